#include "proto/shm/record.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// At most what is left up to the ring's end.
absl::Span<std::byte> At(const ShmPipe& pipe, uint64_t position, uint64_t bytes) {
  return pipe.ring.subspan(position % pipe.ring.size(), bytes);
}

absl::Status CheckHeader(const ShmRecord& record, uint64_t sequence, uint32_t most_body_bytes) {
  if (record.sequence != sequence) {
    return absl::DataLossError(
        absl::StrCat("record ", sequence, " of the shared-memory transport says that it is ", record.sequence));
  }
  if (record.body_bytes > most_body_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("record ", sequence, " of the shared-memory transport has ",
                                                     record.body_bytes, " bytes, and none may be larger than ",
                                                     most_body_bytes));
  }
  const bool known = record.type >= ShmRecord::kMessage && record.type <= ShmRecord::kFinish;
  const bool payload = record.slot != ShmRecord::kNoSlot;
  const bool placed =
      payload ? record.type == ShmRecord::kMessage && record.payload_bytes > 0 : record.payload_bytes == 0;
  if (known && placed && record.zero == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "record ", sequence, " of the shared-memory transport has the type ", record.type, " and a payload of ",
      record.payload_bytes, " bytes in slot ", record.slot, "; no client of this version writes that"));
}

}  // namespace

void ShmRecordWriter::Add(ShmRecord record, absl::string_view body) {
  if (empty()) {
    out_.clear();
    gone_ = 0;
  }
  record.body_bytes = static_cast<uint32_t>(body.size());
  record.sequence = sequence_++;
  out_.append(reinterpret_cast<const char*>(&record), sizeof record);
  out_.append(body.data(), body.size());
}

absl::StatusOr<bool> ShmRecordWriter::Flush() {
  while (!empty()) {
    const uint64_t taken = written_ - pipe_.read->value.load(std::memory_order_acquire);
    if (taken > pipe_.ring.size()) {
      return absl::DataLossError("the reader of the shared-memory transport counts more than was written");
    }
    const uint64_t bytes = std::min<uint64_t>(out_.size() - gone_, pipe_.ring.size() - taken);
    if (bytes == 0) return false;
    const absl::Span<std::byte> to = At(pipe_, written_, bytes);
    std::memcpy(to.data(), out_.data() + gone_, to.size());
    written_ += to.size();
    gone_ += to.size();
    pipe_.written->value.store(written_, std::memory_order_release);
  }
  return true;
}

uint64_t ShmRecordWriter::room() const {
  const uint64_t taken = written_ - pipe_.read->value.load(std::memory_order_acquire);
  return pipe_.ring.size() - std::min<uint64_t>(taken, pipe_.ring.size());
}

absl::StatusOr<uint64_t> ShmRecordReader::Available() const {
  const uint64_t available = pipe_.written->value.load(std::memory_order_acquire) - read_;
  if (available <= pipe_.ring.size()) return available;
  return absl::DataLossError("the writer of the shared-memory transport counts more than its pipe holds");
}

void ShmRecordReader::Copy(std::byte* to, uint64_t bytes) {
  while (bytes > 0) {
    const absl::Span<std::byte> from = At(pipe_, read_, bytes);
    std::memcpy(to, from.data(), from.size());
    read_ += from.size();
    to += from.size();
    bytes -= from.size();
  }
  pipe_.read->value.store(read_, std::memory_order_release);
}

absl::StatusOr<bool> ShmRecordReader::ReadHeader(uint64_t* available) {
  if (*available < sizeof header_) return false;
  Copy(reinterpret_cast<std::byte*>(&header_), sizeof header_);
  *available -= sizeof header_;
  if (absl::Status s = CheckHeader(header_, sequence_, most_body_bytes_); !s.ok()) return s;
  body_.clear();
  in_body_ = true;
  return true;
}

absl::StatusOr<bool> ShmRecordReader::Next(ShmRecord* record) {
  absl::StatusOr<uint64_t> available = Available();
  if (!available.ok()) return available.status();
  if (!in_body_) {
    const auto read = ReadHeader(&*available);
    if (!read.ok() || !*read) return read;
  }
  const uint64_t bytes = std::min<uint64_t>(*available, header_.body_bytes - body_.size());
  const size_t before = body_.size();
  body_.resize(before + bytes);
  Copy(reinterpret_cast<std::byte*>(body_.data() + before), bytes);
  if (body_.size() < header_.body_bytes) return false;
  in_body_ = false;
  ++sequence_;
  *record = header_;
  return true;
}

bool ShmRecordReader::HasMore() const {
  const uint64_t available = pipe_.written->value.load(std::memory_order_acquire) - read_;
  return available >= (in_body_ ? 1 : sizeof(ShmRecord));
}

}  // namespace ballast
