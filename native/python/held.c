/* Calls that keep the interpreter's lock, because they are shorter than handing it over and back.
 *
 * A call through cffi lets go of the lock. When several threads make calls of three microseconds, they
 * then spend their time with passing it around, and four threads move less than one. A second module
 * in the same library (mooncake_py/_native/held.py loads it) has what waits for nobody. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "mooncake/mooncake.h"

/* (engine as a number, peer id, rows) -> status, 1: nothing was done */
static PyObject *transfer_now(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "3 arguments, not %zd", count);
    mc_engine *engine = PyLong_AsVoidPtr(given[0]);
    const uint64_t peer = PyLong_AsUnsignedLongLong(given[1]);
    Py_buffer rows;
    if (PyErr_Occurred() || PyObject_GetBuffer(given[2], &rows, PyBUF_WRITABLE) != 0) return NULL;
    const int32_t status = mc_transfer_now(engine, peer, rows.buf,
                                           (uint64_t)rows.len / sizeof(mc_slice));
    PyBuffer_Release(&rows);
    return PyLong_FromLong(status);
}

/* A `mc_keys *` as a number; null with an exception. */
static mc_keys *keys_of(PyObject *const *given, Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return PyLong_AsVoidPtr(given[0]);
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, count);
    return NULL;
}

static int text_of(PyObject *given, mc_text *out) {
    char *data;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(given, &data, &nbytes) != 0) return -1;
    out->data = (const uint8_t *)data;
    out->nbytes = (uint64_t)nbytes;
    return 0;
}

/* (keys, slot, tenant, key) -> status */
static PyObject *keys_set(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    mc_keys *keys = keys_of(given, count, 4);
    mc_text key;
    if (keys == NULL || text_of(given[3], &key) != 0) return NULL;
    const unsigned long slot = PyLong_AsUnsignedLong(given[1]);
    const unsigned long tenant = PyLong_AsUnsignedLong(given[2]);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(
        mc_keys_set(keys, (uint32_t)slot, (uint16_t)tenant, key.data, key.nbytes));
}

/* (keys, slot) -> what the call answers */
static PyObject *keys_slot(PyObject *const *given, Py_ssize_t count,
                           int32_t (*call)(mc_keys *, uint32_t)) {
    mc_keys *keys = keys_of(given, count, 2);
    if (keys == NULL) return NULL;
    const unsigned long slot = PyLong_AsUnsignedLong(given[1]);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(call(keys, (uint32_t)slot));
}

static PyObject *keys_enter(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return keys_slot(given, count, mc_keys_enter);
}

static PyObject *keys_leave(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return keys_slot(given, count, mc_keys_leave);
}

static PyObject *keys_clear(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    return keys_slot(given, count, mc_keys_clear);
}

/* (keys, tenant, key) -> slot or -1 */
static PyObject *keys_find(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    mc_keys *keys = keys_of(given, count, 3);
    mc_text key;
    if (keys == NULL || text_of(given[2], &key) != 0) return NULL;
    const unsigned long tenant = PyLong_AsUnsignedLong(given[1]);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(mc_keys_find(keys, (uint16_t)tenant, key.data, key.nbytes));
}

/* (keys, tenant, list or tuple of keys, int32 for each) */
static PyObject *keys_find_many(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    mc_keys *keys = keys_of(given, count, 4);
    if (keys == NULL) return NULL;
    const unsigned long tenant = PyLong_AsUnsignedLong(given[1]);
    const Py_ssize_t n = PySequence_Size(given[2]);
    Py_buffer slots;
    if (PyErr_Occurred() || PyObject_GetBuffer(given[3], &slots, PyBUF_WRITABLE) != 0) return NULL;
    enum { TOGETHER = 64 };
    mc_text texts[TOGETHER];
    PyObject *const list = given[2];
    const int is_list = PyList_Check(list);
    Py_ssize_t done = 0;
    while (done < n && n <= slots.len / (Py_ssize_t)sizeof(int32_t)) {
        Py_ssize_t some = 0;
        for (; some < TOGETHER && done + some < n; some++) {
            PyObject *const key = is_list ? PyList_GetItem(list, done + some)
                                          : PyTuple_GetItem(list, done + some);
            if (key == NULL || text_of(key, &texts[some]) != 0) break;
        }
        if (PyErr_Occurred()) break;
        mc_keys_find_many(keys, (uint16_t)tenant, texts, (uint64_t)some, (int32_t *)slots.buf + done);
        done += some;
    }
    PyBuffer_Release(&slots);
    if (PyErr_Occurred()) return NULL;
    if (done != n) return PyErr_Format(PyExc_ValueError, "room for fewer slots than %zd", n);
    Py_RETURN_NONE;
}

static PyObject *text_at(mc_keys *keys, uint32_t slot) {
    const uint8_t *text;
    const int32_t nbytes = mc_keys_text(keys, slot, &text);
    if (nbytes >= 0) return PyBytes_FromStringAndSize((const char *)text, nbytes);
    Py_RETURN_NONE;
}

/* (keys, slot) -> its key, or None */
static PyObject *keys_text(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    mc_keys *keys = keys_of(given, count, 2);
    if (keys == NULL) return NULL;
    const unsigned long slot = PyLong_AsUnsignedLong(given[1]);
    return PyErr_Occurred() ? NULL : text_at(keys, (uint32_t)slot);
}

/* (keys, int64 slots) -> list of their keys, or None */
static PyObject *keys_texts(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    mc_keys *keys = keys_of(given, count, 2);
    Py_buffer slots;
    if (keys == NULL || PyObject_GetBuffer(given[1], &slots, PyBUF_SIMPLE) != 0) return NULL;
    const Py_ssize_t n = slots.len / (Py_ssize_t)sizeof(int64_t);
    PyObject *found = PyList_New(n);
    for (Py_ssize_t i = 0; found != NULL && i < n; i++) {
        PyObject *const text = text_at(keys, (uint32_t)((const int64_t *)slots.buf)[i]);
        if (text == NULL || PyList_SetItem(found, i, text) != 0) Py_CLEAR(found);
    }
    PyBuffer_Release(&slots);
    return found;
}

/* (uint32 next, uint32 previous, int64 slots, head) */
static PyObject *links_move(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    (void)self;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "4 arguments, not %zd", count);
    const unsigned long head = PyLong_AsUnsignedLong(given[3]);
    Py_buffer column[3];
    int have = 0;
    if (PyErr_Occurred()) return NULL;
    while (have < 3 && PyObject_GetBuffer(given[have], &column[have],
                                          have < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) {
        have++;
    }
    if (have == 3) {
        mc_links_move(column[0].buf, column[1].buf, column[2].buf,
                      (uint64_t)column[2].len / sizeof(int64_t), (uint32_t)head);
    }
    const int good = have == 3;
    while (have > 0) PyBuffer_Release(&column[--have]);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"transfer_now", (PyCFunction)(void (*)(void))transfer_now, METH_FASTCALL, NULL},
    {"keys_set", (PyCFunction)(void (*)(void))keys_set, METH_FASTCALL, NULL},
    {"keys_enter", (PyCFunction)(void (*)(void))keys_enter, METH_FASTCALL, NULL},
    {"keys_leave", (PyCFunction)(void (*)(void))keys_leave, METH_FASTCALL, NULL},
    {"keys_clear", (PyCFunction)(void (*)(void))keys_clear, METH_FASTCALL, NULL},
    {"keys_find", (PyCFunction)(void (*)(void))keys_find, METH_FASTCALL, NULL},
    {"keys_find_many", (PyCFunction)(void (*)(void))keys_find_many, METH_FASTCALL, NULL},
    {"keys_text", (PyCFunction)(void (*)(void))keys_text, METH_FASTCALL, NULL},
    {"keys_texts", (PyCFunction)(void (*)(void))keys_texts, METH_FASTCALL, NULL},
    {"links_move", (PyCFunction)(void (*)(void))links_move, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_held", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__held(void) { return PyModule_Create(&module); }
