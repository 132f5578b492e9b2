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

static PyMethodDef methods[] = {
    {"transfer_now", (PyCFunction)(void (*)(void))transfer_now, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_held", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__held(void) { return PyModule_Create(&module); }
