// The addresses of the fake CUDA driver's GPUs, fake_cuda.h, and what is mapped there. Results are CUresults. The caller
// locks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>

namespace ballast {

namespace cuda {
enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
};
constexpr int kGpus = 3, kSecluded = 2;  // the last reaches no memory of other processes
using Address = unsigned long long;
using Allocation = unsigned long long;
struct Access {
  int location_type = 0, gpu = 0, flags = 0;
};
}  // namespace cuda

class FakeCudaMemory {
 public:
  ~FakeCudaMemory();
  int Import(cuda::Allocation* allocation, void* handle, int type);
  int Drop(cuda::Allocation allocation);
  int Reserve(cuda::Address* at, size_t bytes);
  int Unreserve(cuda::Address at, size_t bytes);
  int Map(cuda::Address at, size_t bytes, size_t offset, cuda::Allocation allocation);
  int Unmap(cuda::Address at, size_t bytes);
  int SetAccess(cuda::Address at, size_t bytes, const cuda::Access* access, size_t count);
  int Allocate(cuda::Address* at, size_t bytes, int gpu);
  int Free(cuda::Address at);

  bool IsMapped(cuda::Address at) const;
  // Where the fake finds those bytes, which are the host's elsewhere; nullopt: the GPU has no access to all of them.
  std::optional<std::byte*> Resolve(cuda::Address at, size_t bytes, int gpu) const;

  size_t allocations() const { return allocations_.size(); }
  size_t reservations() const { return reservations_.size(); }
  size_t mappings() const { return mappings_.size(); }

 private:
  struct Mapping {
    uint64_t bytes = 0;
    std::byte* view = nullptr;  // where the fake reads and writes
    std::set<int> gpus;         // that have access
  };
  bool Overlaps(cuda::Address at, size_t bytes) const;

  cuda::Allocation last_allocation_ = 0x1000;
  std::map<cuda::Allocation, int> allocations_;  // a descriptor of each
  std::map<cuda::Address, uint64_t> reservations_;
  std::map<cuda::Address, Mapping> mappings_;
};

}  // namespace ballast
