#include "proto/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics of two processes");

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint64_t kPage = 4096;
// Bounds that keep every sum below within 64 bits and every count within reason.
constexpr uint32_t kMostSlots = 1 << 16;
constexpr uint64_t kMostSlotBytes = 1 << 26;
constexpr uint32_t kLeastPipe = 1 << 10, kMostPipe = 1 << 24;

uint64_t Pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Where its parts begin.
struct Layout {
  explicit Layout(const ShmShape& shape)
      : gradient_marks(Pages(sizeof(ShmControl))),
        weight_marks(gradient_marks + shape.gradient_slots * sizeof(uint32_t)),
        up_pipe(Pages(weight_marks + shape.weight_slots * sizeof(uint32_t))),
        down_pipe(up_pipe + shape.pipe_bytes),
        gradients(Pages(down_pipe + shape.pipe_bytes)),
        weights(Pages(gradients + shape.gradient_slots * shape.gradient_slot_bytes)),
        end(shape.on_gpu != 0 ? gradients : Pages(weights + shape.weight_slots * shape.weight_slot_bytes)) {}
  uint64_t gradient_marks, weight_marks, up_pipe, down_pipe, gradients, weights, end;
};

bool IsAligned(const ShmShape& shape) {
  return shape.gradient_slot_bytes % kGpuSlotAlignment == 0 && shape.weight_slot_bytes % kGpuSlotAlignment == 0;
}

absl::Status SystemError(absl::StatusCode code, absl::string_view what) {
  const int error = errno;
  return {code, absl::StrCat(what, ": ", std::strerror(error))};
}

}  // namespace

absl::Status CheckShape(const ShmShape& shape) {
  const bool pipes =
      std::has_single_bit(shape.pipe_bytes) && shape.pipe_bytes >= kLeastPipe && shape.pipe_bytes <= kMostPipe;
  const bool slots = shape.gradient_slots <= kMostSlots && shape.weight_slots <= kMostSlots &&
                     shape.gradient_slot_bytes <= kMostSlotBytes && shape.weight_slot_bytes <= kMostSlotBytes;
  const bool place = shape.on_gpu == 0 || (shape.on_gpu == 1 && IsAligned(shape));
  if (pipes && slots && place) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a shared segment of two pipes of ", shape.pipe_bytes, " bytes, ",
                                                 shape.gradient_slots, " slots of ", shape.gradient_slot_bytes, " and ",
                                                 shape.weight_slots, " of ", shape.weight_slot_bytes,
                                                 " bytes is none that this version knows"));
}

uint64_t ShmBytes(const ShmShape& shape) { return Layout(shape).end; }

uint64_t GpuSlotBytes(const ShmShape& shape) {
  const uint64_t bytes =
      shape.gradient_slots * shape.gradient_slot_bytes + shape.weight_slots * shape.weight_slot_bytes;
  return (bytes + kGpuUnit - 1) / kGpuUnit * kGpuUnit;
}

absl::StatusOr<std::shared_ptr<ShmSegment>> ShmSegment::Create(const ShmShape& shape) {
  if (absl::Status s = CheckShape(shape); !s.ok()) return s;
  const int fd = memfd_create("ballast-rank", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return SystemError(absl::StatusCode::kUnimplemented, "memfd_create");
  const auto give_up = [fd](absl::Status why) {
    close(fd);
    return why;
  };
  const uint64_t bytes = ShmBytes(shape);
  // Reserved now: a page that is missing later would be a signal instead of an error.
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
    return give_up(SystemError(absl::StatusCode::kResourceExhausted,
                               absl::StrCat("the system refused ", bytes, " bytes of shared memory")));
  }
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return give_up(SystemError(absl::StatusCode::kUnimplemented, "sealing shared memory"));
  }
  auto mapped = MapShared(fd, shape);
  if (!mapped.ok()) return give_up(mapped.status());
  (*mapped)->fd_ = fd;
  return mapped;
}

absl::StatusOr<std::shared_ptr<ShmSegment>> ShmSegment::Map(int fd, const ShmShape& shape) {
  if (absl::Status s = CheckShape(shape); !s.ok()) return s;
  struct stat found {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &found) != 0 || seals < 0 || (seals & kSeals) != kSeals ||
      static_cast<uint64_t>(found.st_size) != ShmBytes(shape)) {
    return absl::InvalidArgumentError("the daemon's shared memory is not sealed or has another size than it says");
  }
  return MapShared(fd, shape);
}

absl::StatusOr<std::shared_ptr<ShmSegment>> ShmSegment::MapShared(int fd, const ShmShape& shape) {
  void* const base = mmap(nullptr, ShmBytes(shape), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return SystemError(absl::StatusCode::kResourceExhausted, "mapping shared memory");
  return std::shared_ptr<ShmSegment>(new ShmSegment(shape, -1, static_cast<std::byte*>(base)));
}

ShmSegment::~ShmSegment() {
  munmap(base_, ShmBytes(shape_));
  CloseFd();
}

void ShmSegment::CloseFd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::Span<std::byte> ShmSegment::up_pipe() const { return {base_ + Layout(shape_).up_pipe, shape_.pipe_bytes}; }
absl::Span<std::byte> ShmSegment::down_pipe() const { return {base_ + Layout(shape_).down_pipe, shape_.pipe_bytes}; }

absl::Span<std::atomic<uint32_t>> ShmSegment::gradient_marks() const {
  return {reinterpret_cast<std::atomic<uint32_t>*>(base_ + Layout(shape_).gradient_marks), shape_.gradient_slots};
}
absl::Span<std::atomic<uint32_t>> ShmSegment::weight_marks() const {
  return {reinterpret_cast<std::atomic<uint32_t>*>(base_ + Layout(shape_).weight_marks), shape_.weight_slots};
}
std::byte* ShmSegment::gradient_slots(std::byte* gpu) const {
  return shape_.on_gpu != 0 ? gpu : base_ + Layout(shape_).gradients;
}
std::byte* ShmSegment::weight_slots(std::byte* gpu) const {
  return shape_.on_gpu != 0 ? gpu + shape_.gradient_slots * shape_.gradient_slot_bytes : base_ + Layout(shape_).weights;
}

}  // namespace ballast
