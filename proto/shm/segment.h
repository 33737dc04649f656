// The memory that a trainer and its daemon share on one host: for each rank one sealed memfd, made by the daemon. How
// this and the other headers belong together: proto/PROTOCOL.md, "Shared memory".
//
//   control   two bells, and for each pipe and kind of slot the two counters of its progress
//   marks     for each slot how often its borrower has given it back
//   pipes     records (proto/shm/record.h), one pipe each way
//   slots     payloads: gradients, which the trainer lends to the daemon, and weights the other way; or they are in the memory
//             of the daemon's GPU, which it exports to a descriptor of its own (on_gpu)
//
// The seals (no shrinking, no growing, no more seals) make every access within the shape safe. What is in it is the
// peer's to change at any time: shapes, positions and who has which slot are therefore kept outside, and what is read
// here is read once, copied and then checked.
//
// Unsynchronized but for its atomics; the classes that use it say who may call them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast {

// As it is sent in a grant. A slot of 0 bytes: the run has no such payload.
struct ShmShape {
  uint32_t pipe_bytes = 0;  // of each; a power of two
  uint32_t gradient_slots = 0;
  uint32_t weight_slots = 0;
  uint32_t on_gpu = 0;  // 1: the slots are not in the segment
  uint64_t gradient_slot_bytes = 0;
  uint64_t weight_slot_bytes = 0;
  bool operator==(const ShmShape&) const = default;
};
// INVALID_ARGUMENT unless every number is one that a daemon may choose.
absl::Status CheckShape(const ShmShape& shape);
// The size of the whole segment.
uint64_t ShmBytes(const ShmShape& shape);
// What slots that are on_gpu take there: those of gradients, then those of weights; in whole units of what GPUs hand out.
uint64_t GpuSlotBytes(const ShmShape& shape);
inline constexpr uint64_t kGpuUnit = 2 << 20;
inline constexpr uint64_t kGpuSlotAlignment = 256;

struct alignas(64) ShmBell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> asleep;
};
struct alignas(64) ShmCounter {
  std::atomic<uint64_t> value;
};
// The end that sleeps until there is room raises the flag. The end that makes room takes it down and then rings, so
// that nobody rings in vain.
struct alignas(64) ShmFlag {
  std::atomic<uint32_t> raised;
  void Raise() { raised.store(1); }
  bool TakeDown() { return raised.exchange(0) != 0; }
};
struct ShmControl {
  ShmBell daemon_bell, trainer_bell;  // by whom they wake
  ShmCounter up_written, up_read;     // bytes through the pipe to the daemon
  ShmCounter down_written, down_read;
  ShmCounter gradients_returned, weights_returned;  // slots, counted on
  ShmFlag up_full, down_full;                       // the writer of the pipe waits
  ShmCounter daemon_beats, trainer_beats;           // see proto/shm/pulse.h
  ShmFlag let_go;                                   // the daemon has: a hint to look at the socket
  ShmFlag weights_out;                              // the daemon waits for a weight slot
};

class ShmSegment {
 public:
  // Reserves the memory. RESOURCE_EXHAUSTED, UNIMPLEMENTED (a system without memfd).
  static absl::StatusOr<std::shared_ptr<ShmSegment>> Create(const ShmShape& shape);
  // Maps one that came over a socket; `fd` stays the caller's. INVALID_ARGUMENT unless it is sealed and has the size.
  static absl::StatusOr<std::shared_ptr<ShmSegment>> Map(int fd, const ShmShape& shape);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  int fd() const { return fd_; }  // of Create, until CloseFd; else -1
  void CloseFd();
  const ShmShape& shape() const { return shape_; }
  ShmControl& control() const { return *reinterpret_cast<ShmControl*>(base_); }
  absl::Span<std::byte> up_pipe() const;
  absl::Span<std::byte> down_pipe() const;
  absl::Span<std::atomic<uint32_t>> gradient_marks() const;
  absl::Span<std::atomic<uint32_t>> weight_marks() const;
  // gpu: the memory of slots that are on_gpu.
  std::byte* gradient_slots(std::byte* gpu = nullptr) const;
  std::byte* weight_slots(std::byte* gpu = nullptr) const;

 private:
  ShmSegment(const ShmShape& shape, int fd, std::byte* base) : shape_(shape), fd_(fd), base_(base) {}
  static absl::StatusOr<std::shared_ptr<ShmSegment>> MapShared(int fd, const ShmShape& shape);

  const ShmShape shape_;
  int fd_;
  std::byte* const base_;
};

}  // namespace ballast
