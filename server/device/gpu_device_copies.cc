// What processors do for a GPU: sums in pinned memory, copies to the staging and from it, each shared by a team. And memory
// that is shared with another process.
#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/checksum.h"

#include "server/base/status_macros.h"
#include "server/device/gpu_device.h"

namespace ballast {
namespace {

// What a thread takes at once, some 10 us; of less than two of them, the workers need not be woken.
constexpr uint64_t kPartBytes = 128 << 10, kPartElements = kPartBytes / sizeof(float);
static_assert(kPartElements % kernels::kTile == 0);

void ShareIfWorth(WorkerTeam* team, uint64_t bytes, uint64_t parts, absl::FunctionRef<void(uint64_t)> work) {
  if (bytes >= 2 * kPartBytes) return team->Share(parts, work);
  for (uint64_t i = 0; i < parts; ++i) work(i);
}

void MakeCopies(WorkerTeam* team, const std::vector<GpuStaging::HostCopy>& copies) {
  uint64_t bytes = 0;
  for (const GpuStaging::HostCopy& copy : copies) bytes += copy.bytes;
  ShareIfWorth(team, bytes, copies.size(), [&copies](uint64_t i) {
    const GpuStaging::HostCopy& copy = copies[i];
    if (copy.crc32c == nullptr) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      *copy.crc32c = CopyCrc32c(copy.to, {copy.from, copy.bytes});
    }
  });
}

}  // namespace

// A sum that writes to where another of the batch does comes after it: it adds to what that makes, or that is of a step that
// came to nothing, and the next one reuses its memory.
void GpuDevice::RunSums(std::vector<DeviceJob>* jobs) {
  MemoryRange all;  // around sums_, so that few are looked at
  for (DeviceJob& job : *jobs) {
    const SumTask* const sum = HostSumOf(job.task);
    if (sum == nullptr || sum->elements == 0) continue;
    for (SumTask::Term& term : std::get<SumTask>(job.task).terms) {
      if (term.payload.on_device()) term.payload.Keep();
    }
    const MemoryRange place = PlaceOf(*sum);
    const auto overlaps = [&](const SumTask* other) { return Overlap(PlaceOf(*other), place); };
    if (Overlap(all, place) && std::ranges::any_of(sums_, overlaps)) ShareSums();
    all = Around(sums_.empty() ? MemoryRange() : all, place);
    sums_.push_back(sum);
    sum_bytes_ += job.cost_bytes;
  }
  ShareSums();
}

void GpuDevice::ShareSums() {
  parts_.clear();
  for (const SumTask* sum : sums_) {
    for (uint64_t begin = 0; begin < sum->elements; begin += kPartElements) {
      parts_.push_back({sum, begin, std::min(sum->elements, begin + kPartElements)});
    }
  }
  ShareIfWorth(&adders_, std::exchange(sum_bytes_, 0), parts_.size(),
               [this](uint64_t i) { RunSum(*parts_[i].sum, parts_[i].begin, parts_[i].end); });
  sums_.clear();
}

void GpuDevice::CopyIn(const GpuStaging& staging) {
  arrivals_.clear();
  staging.AddArrivals(kPartBytes, &arrivals_);
  MakeCopies(&adders_, arrivals_);
}

void GpuDevice::CopyOut(const GpuStaging& staging) {
  copies_.clear();
  staging.AddCopies(kPartBytes, &copies_);
  MakeCopies(&copiers_, copies_);
}

class GpuDevice::Shared final : public SharedMemory {
 public:
  Shared(GpuDevice* device, const GpuDriver::Shared& memory) : device_(device), memory_(memory) {
    for (auto* bytes : {&device_->allocated_, &device_->shared_}) {
      bytes->fetch_add(memory_.bytes, std::memory_order_relaxed);
    }
  }
  ~Shared() override {
    for (auto* bytes : {&device_->allocated_, &device_->shared_}) {
      bytes->fetch_sub(memory_.bytes, std::memory_order_relaxed);
    }
    device_->gpu_->FreeShared(memory_);
  }
  std::byte* data() const override { return memory_.data; }
  uint64_t bytes() const override { return memory_.bytes; }
  int fd() const override { return memory_.fd; }
  void Read(const std::byte* from, uint64_t bytes, void* to) const override { device_->gpu_->Read(to, from, bytes); }

 private:
  GpuDevice* const device_;
  const GpuDriver::Shared memory_;
};

absl::StatusOr<std::unique_ptr<SharedMemory>> GpuDevice::Export(uint64_t bytes) {
  ASSIGN_OR_RETURN(const GpuDriver::Shared memory, gpu_->AllocateShared(bytes));
  return std::make_unique<Shared>(this, memory);
}

}  // namespace ballast
