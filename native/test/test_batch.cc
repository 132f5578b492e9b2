// Which slices travel together, and that each has its own outcome all the same.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "check.h"
#include "transport/batch.h"

namespace {

using mc::Batch;
using mc::Part;

constexpr uint64_t kMax = 1 << 20, kMerged = 16 << 10;

std::vector<mc_slice> side_by_side(uint64_t n, uint64_t length) {
  std::vector<mc_slice> slices(n);
  for (uint64_t i = 0; i < n; ++i) {
    slices[i] = {MC_OP_READ, 1, 4096 + i * length, 1 << 20 | i * length, length, 0, 0, 0, 0};
  }
  return slices;
}

std::vector<Part> parts_of(Batch& batch) {
  std::vector<Part> parts;
  Part part;
  while (batch.next_part(kMax, kMax, &part, kMerged) == Batch::Next::kPart) parts.push_back(part);
  return parts;
}

std::vector<uint64_t> shape(std::vector<mc_slice> slices) {
  Batch batch(slices.data(), slices.size(), 10'000);
  std::vector<uint64_t> counts;
  for (const Part& part : parts_of(batch)) counts.push_back(part.slices);
  batch.finish(MC_E_CANCELLED, "");
  return counts;
}

using Counts = std::vector<uint64_t>;

void merged_up_to_the_bound() {
  CHECK(shape(side_by_side(10, 4096)) == Counts({4, 4, 2}));
  CHECK(shape(side_by_side(3, kMerged)) == Counts({1, 1, 1}));
  CHECK(shape(side_by_side(2, kMax + 1)) == Counts({1, 1, 1, 1}));  // each in two parts
}

void only_what_is_alike_is_merged() {
  using Change = void (*)(mc_slice&);
  for (const Change change : {
           Change([](mc_slice& one) { one.op = MC_OP_WRITE; }),
           Change([](mc_slice& one) { one.region = 2; }),
           Change([](mc_slice& one) { one.flags = MC_SLICE_CRC; }),
           Change([](mc_slice& one) { one.local += 1; }),
           Change([](mc_slice& one) { one.remote_offset += 1; }),
       }) {
    auto slices = side_by_side(3, 1000);
    change(slices[1]);
    CHECK(shape(slices) == Counts({1, 1, 1}));
  }
  auto fenced = side_by_side(3, 1000);
  fenced[1].flags = MC_SLICE_FENCE;
  CHECK(shape(fenced) == Counts({1}));  // the others wait for it
  auto far = side_by_side(2, 1000);
  far[0].remote_offset = UINT64_MAX - 999;  // what would lie behind it is no offset
  far[1].remote_offset = 0;
  CHECK(shape(far) == Counts({1, 1}));
}

void refused_ones_are_tried_alone() {
  auto slices = side_by_side(4, 1000);
  Batch batch(slices.data(), slices.size(), 10'000);
  const std::vector<Part> together = parts_of(batch);
  CHECK_EQ(together.size(), 1U);
  CHECK_EQ(together[0].length, 4000U);
  CHECK(batch.part_done(together[0], MC_E_ACCESS, 0, "refused"));
  const std::vector<Part> alone = parts_of(batch);
  CHECK_EQ(alone.size(), 4U);
  for (const Part& part : alone) {
    CHECK_EQ(part.slices, 1U);
    CHECK(!batch.done());
    CHECK(!batch.part_done(part, part.slice == 2 ? MC_E_ACCESS : MC_OK, 0, "refused"));
  }
  CHECK(batch.done());
  for (uint64_t i = 0; i < 4; ++i) CHECK_EQ(slices[i].status, i == 2 ? MC_E_ACCESS : MC_OK);
  CHECK(batch.outcome().reason == "slice 2: refused");
}

void other_failures_are_of_all_of_them() {
  auto slices = side_by_side(3, 1000);
  Batch batch(slices.data(), slices.size(), 10'000);
  CHECK(!batch.part_done(parts_of(batch)[0], MC_E_PEER_UNREACHABLE, 0, "gone"));
  CHECK(batch.done());
  for (const mc_slice& slice : slices) CHECK_EQ(slice.status, MC_E_PEER_UNREACHABLE);
}

void a_stopped_batch_hands_out_nothing_again() {
  auto slices = side_by_side(2, 1000);
  Batch batch(slices.data(), slices.size(), 10'000);
  const Part part = parts_of(batch)[0];
  batch.stop();
  CHECK(!batch.part_done(part, MC_E_ACCESS, 0, "refused"));
  batch.finish(MC_E_CANCELLED, "cancelled");
  CHECK(parts_of(batch).empty());
  CHECK_EQ(slices[1].status, MC_E_ACCESS);
}

// Whoever completed the last slice says so after the lock, and finish() may come in between.
void what_has_finished_is_done_whoever_completed_it() {
  auto slices = side_by_side(4096, 1);
  for (int round = 0; round < 1000; ++round) {
    Batch batch(slices.data(), slices.size(), 10'000);
    const Part part = parts_of(batch)[0];
    std::atomic<bool> begun = false;
    std::thread other([&] {
      begun = true;
      (void)batch.part_done(part, MC_OK, 0);  // thousands of slices: finish() waits for the lock
    });
    while (!begun) std::this_thread::yield();
    batch.finish(MC_E_CANCELLED, "cancelled");
    CHECK(batch.done());
    other.join();
  }
}

}  // namespace

int main() {
  merged_up_to_the_bound();
  only_what_is_alike_is_merged();
  refused_ones_are_tried_alone();
  other_failures_are_of_all_of_them();
  a_stopped_batch_hands_out_nothing_again();
  what_has_finished_is_done_whoever_completed_it();
  return 0;
}
