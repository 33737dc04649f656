// Records through a pipe of shared memory: a header of 32 bytes, then a body, both at any byte of the ring, so that a
// body may be longer than the pipe. A large payload is not in it: the header names the slot that holds it.
//
//   writer.Add({.type = ShmRecord::kMessage, .slot = 3, .payload_bytes = n}, body);
//   writer.Flush();                        // as much as there is room for
//   while (reader.Next(&record)) ...;      // record: a copy, checked; body: reader.body()
//
// The reader trusts nothing: a position is read once and held against its own, a header is copied out before it is
// checked, and a body takes memory only as it comes. The sequence number makes a reader that lost its place say so.
//
// Thread-compatible, each end for itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/shm/segment.h"

namespace ballast {

struct ShmRecord {
  // kMessage: the body is a TrainRequest or TrainResponse, without its data where there is a slot. kHalfClose: the
  // trainer has said all it will. kFinish: the daemon's last; the body is the status's code, four bytes little end
  // first, and its message.
  enum Type : uint32_t { kMessage = 1, kHalfClose = 2, kFinish = 3 };
  static constexpr uint32_t kNoSlot = 0xffffffff;

  uint32_t type = 0;
  uint32_t body_bytes = 0;
  uint64_t sequence = 0;
  uint32_t slot = kNoSlot;
  uint32_t payload_bytes = 0;
  uint64_t zero = 0;
};
static_assert(sizeof(ShmRecord) == 32);

// One end's view of a pipe. `written` and `read` count bytes from the beginning.
struct ShmPipe {
  absl::Span<std::byte> ring;
  ShmCounter* written = nullptr;
  ShmCounter* read = nullptr;
};
inline ShmPipe UpPipe(const ShmSegment& s) { return {s.up_pipe(), &s.control().up_written, &s.control().up_read}; }
inline ShmPipe DownPipe(const ShmSegment& s) {
  return {s.down_pipe(), &s.control().down_written, &s.control().down_read};
}

class ShmRecordWriter {
 public:
  explicit ShmRecordWriter(const ShmPipe& pipe) : pipe_(pipe) {}

  // Queues a record, and fills in its size and sequence. It waits in memory until Flush has written it.
  void Add(ShmRecord record, absl::string_view body);
  // Writes as much as there is room for; true: everything. DATA_LOSS: the reader's counter is impossible.
  absl::StatusOr<bool> Flush();
  bool empty() const { return out_.size() == gone_; }
  uint64_t waiting_bytes() const { return out_.size() - gone_; }
  // Flush could go on.
  bool HasRoom() const { return room() > 0; }
  // Bytes that the pipe would take at once, headers of 32 bytes among them.
  uint64_t room() const;

 private:
  const ShmPipe pipe_;
  uint64_t written_ = 0;
  uint64_t sequence_ = 0;
  std::string out_;
  size_t gone_ = 0;  // of out_
};

class ShmRecordReader {
 public:
  ShmRecordReader(const ShmPipe& pipe, uint32_t most_body_bytes) : pipe_(pipe), most_body_bytes_(most_body_bytes) {}

  // False: the next record is not there yet, or not whole. After an error nothing more is read. DATA_LOSS: the counters
  // or the sequence number are impossible. INVALID_ARGUMENT: no writer makes such a header. RESOURCE_EXHAUSTED: the
  // body is too long.
  absl::StatusOr<bool> Next(ShmRecord* record);
  // The body of the record that the last successful Next returned; valid until the next call of Next.
  const std::string& body() const { return body_; }
  // Whether something came since Next returned false.
  bool HasMore() const;

 private:
  absl::StatusOr<uint64_t> Available() const;
  absl::StatusOr<bool> ReadHeader(uint64_t* available);
  void Copy(std::byte* to, uint64_t bytes);

  const ShmPipe pipe_;
  const uint32_t most_body_bytes_;
  uint64_t read_ = 0;
  uint64_t sequence_ = 0;
  bool in_body_ = false;
  ShmRecord header_;
  std::string body_;
};

}  // namespace ballast
