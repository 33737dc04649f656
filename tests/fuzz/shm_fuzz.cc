// The daemon's end of the shared-memory transport against a trainer that may write anything anywhere at any time: bytes
// are read as what such a trainer does, between what the daemon does. Whatever it is, a record's body and payload lie
// within their bounds, no slot is borrowed or filled twice, and memory grows only with bytes that came.
//
// A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "proto/shm/record.h"
#include "proto/shm/slots.h"

#include "tests/fuzz/input.h"

namespace ballast {
namespace {

using fuzz::Input;

constexpr ShmShape kShape = {
    .pipe_bytes = 1024, .gradient_slots = 5, .weight_slots = 3, .gradient_slot_bytes = 192, .weight_slot_bytes = 64};
constexpr uint32_t kMostBody = 4096;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}
void Require(bool holds, const char* what) {
  if (!holds) Fail(what);
}

// One daemon's end, and a trainer's writer that helps to get behind the first checks.
class Ends {
 public:
  explicit Ends(ShmSegment* segment) : segment_(*segment) {
    std::memset(static_cast<void*>(&segment->control()), 0, ShmBytes(kShape));
  }

  // The trainer's.
  void WriteRecord(Input* in) {
    ShmRecord record{.type = in->Take<uint8_t>() % 5u, .slot = in->Take<uint8_t>() % 8u, .payload_bytes = 1};
    record.payload_bytes = in->Take<uint8_t>();
    if (record.slot == 7) record.slot = ShmRecord::kNoSlot, record.payload_bytes = 0;
    if (trainer_.empty()) trainer_.Add(record, std::string(in->Take<uint8_t>(), 'b'));
    (void)trainer_.Flush().ok();  // its view may be spoilt: that is its own affair
  }
  // Any word of the control page, the marks, or all that is before the slots.
  void Scribble(Input* in) {
    const auto to_pipes = static_cast<uint64_t>(segment_.up_pipe().data() - base());
    const uint64_t bound = in->Take<uint8_t>() % 2 == 0 ? to_pipes : to_pipes + 2 * kShape.pipe_bytes;
    const uint64_t word = in->Take<uint16_t>() % (bound / 4);
    const auto value = in->Take<uint32_t>();
    std::memcpy(base() + word * 4, &value, sizeof value);
  }
  void MoveCounter(Input* in) {
    ShmControl& c = segment_.control();
    ShmCounter* const all[] = {&c.up_written,         &c.up_read,         &c.down_written, &c.down_read,
                               &c.gradients_returned, &c.weights_returned};
    all[in->Take<uint8_t>() % 6]->value += static_cast<uint64_t>(static_cast<int64_t>(in->Take<int16_t>()));
  }

  // The daemon's.
  void Read() {
    if (broken_) return;
    ShmRecord record;
    const auto next = reader_.Next(&record);
    broken_ = !next.ok();  // the stream ends
    Require(reader_.body().size() <= kMostBody, "a body is longer than it may be");
    Require(reader_.body().capacity() <= 2 * kMostBody, "a body takes more memory than came");
    if (!next.ok() || !*next) return;
    Require(record.body_bytes == reader_.body().size(), "a whole body has another size than its header");
    if (record.slot != ShmRecord::kNoSlot) Borrow(record);
  }
  void GiveBack(Input* in) {
    if (borrowed_.empty()) return;
    const size_t some = in->Take<uint8_t>() % borrowed_.size();
    borrower_.GiveBack(borrowed_[some]);
    borrowed_.erase(borrowed_.begin() + static_cast<ptrdiff_t>(some));
  }
  void Encode(Input* in) {
    if (const auto slot = lender_.Take()) {
      Require(*slot < kShape.weight_slots, "a weight slot that there is not");
      Require(std::find(filling_.begin(), filling_.end(), *slot) == filling_.end(), "a weight slot is filled twice");
      std::memset(lender_.at(*slot).data(), 1, kShape.weight_slot_bytes);
      filling_.push_back(*slot);
    }
    Require(lender_.free() <= kShape.weight_slots, "more weight slots are free than there are");
    if (filling_.empty() || in->Take<uint8_t>() % 2 == 0) return;
    const uint32_t slot = filling_.back();
    filling_.pop_back();
    if (in->Take<uint8_t>() % 4 == 0) return lender_.PutBack(slot);
    lender_.Lend(slot);
    if (writer_.empty()) writer_.Add({.type = ShmRecord::kMessage, .slot = slot, .payload_bytes = 64}, "weights");
  }
  void Flush() {
    if (!writer_.Flush().ok()) broken_ = true;
  }
  void CheckAll() const {
    Require(borrower_.borrowed() == borrowed_.size(), "the count of borrowed slots is wrong");
    const std::byte* const end = base() + ShmBytes(kShape);
    for (const uint32_t slot : borrowed_) {
      Require(segment_.gradient_slots() + (slot + 1) * kShape.gradient_slot_bytes <= end, "a slot beyond the segment");
    }
  }

 private:
  std::byte* base() const { return reinterpret_cast<std::byte*>(&segment_.control()); }
  void Borrow(const ShmRecord& record) {
    const auto payload = borrower_.Borrow(record.slot, record.payload_bytes);
    broken_ = !payload.ok();
    if (!payload.ok()) return;
    Require(record.slot < kShape.gradient_slots && payload->size() <= kShape.gradient_slot_bytes, "a payload too long");
    Require(payload->data() == segment_.gradient_slots() + record.slot * kShape.gradient_slot_bytes,
            "a payload that is not at its slot");
    Require(std::find(borrowed_.begin(), borrowed_.end(), record.slot) == borrowed_.end(), "a slot is borrowed twice");
    borrowed_.push_back(record.slot);
  }

  ShmSegment& segment_;
  ShmRecordWriter trainer_{UpPipe(segment_)};
  ShmRecordReader reader_{UpPipe(segment_), kMostBody};
  ShmBorrower borrower_{GradientSlots(segment_)};
  ShmLender lender_{WeightSlots(segment_)};
  ShmRecordWriter writer_{DownPipe(segment_)};
  std::vector<uint32_t> borrowed_, filling_;
  bool broken_ = false;
};

void RunOne(Input in) {
  static const std::shared_ptr<ShmSegment> segment = ShmSegment::Create(kShape).value();
  Ends ends(segment.get());
  while (in.left() > 0) {
    switch (in.Take<uint8_t>() % 8) {
      case 0:
        ends.Scribble(&in);
        break;
      case 1:
        ends.MoveCounter(&in);
        break;
      case 2:
      case 3:
        ends.WriteRecord(&in);
        break;
      case 4:
      case 5:
        ends.Read();
        break;
      case 6:
        ends.GiveBack(&in);
        break;
      default:
        ends.Encode(&in);
        ends.Flush();
    }
    ends.CheckAll();
  }
}

}  // namespace
}  // namespace ballast

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ballast::RunOne({data, size});
  return 0;
}
