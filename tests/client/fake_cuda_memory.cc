#include "tests/client/fake_cuda_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ballast {

using cuda::Address;
using cuda::Allocation;

namespace {

constexpr uint64_t kGranularity = 2 << 20;
constexpr uint64_t kGuard = kGranularity;  // after a reservation: addresses of nobody

bool IsWhole(uint64_t bytes) { return bytes > 0 && bytes % kGranularity == 0; }

// The range that begins at `at` or before it, the last such.
template <typename Ranges>
auto Before(const Ranges& ranges, Address at) {
  auto next = ranges.upper_bound(at);
  return next == ranges.begin() ? ranges.end() : --next;
}

}  // namespace

FakeCudaMemory::~FakeCudaMemory() {
  for (const auto& [at, mapping] : mappings_) munmap(mapping.view, mapping.bytes);
  for (const auto& [at, bytes] : reservations_) munmap(reinterpret_cast<void*>(at), bytes + kGuard);
  for (const auto& [allocation, fd] : allocations_) close(fd);
}

int FakeCudaMemory::Import(Allocation* allocation, void* handle, int type) {
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(handle));
  if (type != 1 || fcntl(fd, F_GET_SEALS) < 0) return cuda::kInvalidValue;  // no memfd
  const int kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (kept < 0) return cuda::kOutOfMemory;
  *allocation = ++last_allocation_;
  allocations_[*allocation] = kept;
  return cuda::kSuccess;
}

int FakeCudaMemory::Drop(Allocation allocation) {
  const auto found = allocations_.find(allocation);
  if (found == allocations_.end()) return cuda::kInvalidValue;
  close(found->second);
  allocations_.erase(found);
  return cuda::kSuccess;
}

int FakeCudaMemory::Reserve(Address* at, size_t bytes) {
  if (!IsWhole(bytes) || bytes + kGuard < bytes) return cuda::kInvalidValue;
  void* const reserved = mmap(nullptr, bytes + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return cuda::kOutOfMemory;
  *at = reinterpret_cast<Address>(reserved);
  reservations_[*at] = bytes;
  return cuda::kSuccess;
}

int FakeCudaMemory::Unreserve(Address at, size_t bytes) {
  const auto found = reservations_.find(at);
  if (found == reservations_.end() || found->second != bytes || Overlaps(at, bytes)) return cuda::kInvalidValue;
  munmap(reinterpret_cast<void*>(at), bytes + kGuard);
  reservations_.erase(found);
  return cuda::kSuccess;
}

int FakeCudaMemory::Map(Address at, size_t bytes, size_t offset, Allocation allocation) {
  const auto allocated = allocations_.find(allocation);
  const auto reserved = Before(reservations_, at);
  if (allocated == allocations_.end() || reserved == reservations_.end()) return cuda::kInvalidValue;
  const uint64_t from = at - reserved->first;
  const bool fits = from <= reserved->second && bytes <= reserved->second - from;
  if (!IsWhole(bytes) || offset != 0 || !fits || Overlaps(at, bytes)) return cuda::kInvalidValue;
  struct stat is = {};
  if (fstat(allocated->second, &is) != 0 || static_cast<uint64_t>(is.st_size) < bytes) return cuda::kInvalidValue;
  void* const view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocated->second, 0);
  if (view == MAP_FAILED) return cuda::kOutOfMemory;
  mappings_[at] = {.bytes = bytes, .view = static_cast<std::byte*>(view)};
  return cuda::kSuccess;
}

int FakeCudaMemory::Unmap(Address at, size_t bytes) {
  const auto found = mappings_.find(at);
  if (found == mappings_.end() || found->second.bytes != bytes) return cuda::kInvalidValue;
  munmap(found->second.view, bytes);
  mappings_.erase(found);
  return cuda::kSuccess;
}

int FakeCudaMemory::SetAccess(Address at, size_t bytes, const cuda::Access* access, size_t count) {
  const auto found = mappings_.find(at);
  if (found == mappings_.end() || found->second.bytes != bytes || count != 1) return cuda::kInvalidValue;
  if (access->location_type != 1 || access->flags != 3) return cuda::kInvalidValue;
  if (access->gpu < 0 || access->gpu >= cuda::kGpus || access->gpu == cuda::kSecluded) return cuda::kInvalidDevice;
  found->second.gpus.insert(access->gpu);
  return cuda::kSuccess;
}

int FakeCudaMemory::Allocate(Address* at, size_t bytes, int gpu) {
  const uint64_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0) return cuda::kOutOfMemory;
  const Allocation allocation = ++last_allocation_;
  allocations_[allocation] = fd;
  int result = ftruncate(fd, static_cast<off_t>(whole)) == 0 ? Reserve(at, whole) : cuda::kOutOfMemory;
  if (result == cuda::kSuccess) {
    result = Map(*at, whole, 0, allocation);
    if (result == cuda::kSuccess) {
      mappings_[*at].gpus = {gpu};
    } else {
      Unreserve(*at, whole);
    }
  }
  Drop(allocation);
  return result;
}

int FakeCudaMemory::Free(Address at) {
  const auto found = reservations_.find(at);
  if (found == reservations_.end()) return cuda::kInvalidValue;
  const uint64_t bytes = found->second;
  const int result = Unmap(at, bytes);
  return result == cuda::kSuccess ? Unreserve(at, bytes) : result;
}

bool FakeCudaMemory::IsMapped(Address at) const {
  const auto found = Before(mappings_, at);
  return found != mappings_.end() && at - found->first < found->second.bytes;
}

std::optional<std::byte*> FakeCudaMemory::Resolve(Address at, size_t bytes, int gpu) const {
  if (!IsMapped(at)) {
    const auto reserved = Before(reservations_, at);
    const bool is_host =
        at != 0 && (reserved == reservations_.end() || at - reserved->first >= reserved->second + kGuard);
    return is_host ? std::optional(reinterpret_cast<std::byte*>(at)) : std::nullopt;
  }
  const auto& [first, mapping] = *Before(mappings_, at);
  if (bytes > mapping.bytes - (at - first) || !mapping.gpus.contains(gpu)) return std::nullopt;
  return mapping.view + (at - first);
}

bool FakeCudaMemory::Overlaps(Address at, size_t bytes) const {
  const auto next = mappings_.lower_bound(at);
  return IsMapped(at) || (next != mappings_.end() && next->first - at < bytes);
}

}  // namespace ballast
