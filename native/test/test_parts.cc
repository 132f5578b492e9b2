// A connection's parts: every one has a tag of its own, however many there were.
#include <cstdint>
#include <memory>

#include "base/abi.h"
#include "check.h"
#include "transport/stream/part_table.h"

namespace {

using mc::Batch;
using mc::Part;
using mc::PartTable;

struct One {
  mc_slice slice{MC_OP_READ, 1, 4096, 1 << 20, 64, 0, 0, 0, 0};
  std::shared_ptr<Batch> batch = std::make_shared<Batch>(&slice, 1, 10'000);
  ~One() { batch->finish(MC_E_CANCELLED, ""); }
};

void a_part_after_the_last_generation_is_a_part() {
  One one;
  PartTable table;
  const uint64_t first = table.add(one.batch, Part());
  // A connection that lives for a day may get there by small parts, one at a time.
  CHECK(table.with(first, [](PartTable::Entry& entry) { entry.generation = UINT32_MAX; }));
  const uint64_t last = uint64_t{UINT32_MAX} << 32 | (first & UINT32_MAX);
  std::shared_ptr<Batch> batch;
  Part part;
  CHECK(table.take(last, &batch, &part));
  const uint64_t next = table.add(one.batch, Part());
  CHECK(next != 0);
  CHECK(!table.with(last, [](PartTable::Entry&) {}));
  CHECK(table.take(next, &batch, &part));
}

void what_was_forgotten_is_not_found_again() {
  One one;
  PartTable table;
  const uint64_t tag = table.add(one.batch, Part());
  CHECK(table.forget(*one.batch).size() == 1);
  CHECK(!table.with(tag, [](PartTable::Entry&) {}));
  CHECK(table.late() == 0);
}

void a_write_that_was_sent_stays_late_until_it_is_answered() {
  One one;
  PartTable table;
  Part write;
  write.op = MC_OP_WRITE;
  const uint64_t tag = table.add(one.batch, write);
  CHECK(table.forget(*one.batch).size() == 1);
  CHECK(table.late() == 1);
  std::shared_ptr<Batch> batch;
  Part part;
  CHECK(!table.take(tag, &batch, &part));
  CHECK(table.late() == 0);
}

}  // namespace

int main() {
  a_part_after_the_last_generation_is_a_part();
  what_was_forgotten_is_not_found_again();
  a_write_that_was_sent_stays_late_until_it_is_answered();
  return 0;
}
