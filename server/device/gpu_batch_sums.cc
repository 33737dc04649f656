// Sums that the GPU makes: their terms on their way to the staging, and the kernels' arguments.
#include "server/device/gpu_batch.h"

namespace ballast {

using kernels::DeviceSum;

void GpuStaging::AddArrivals(uint64_t most, std::vector<HostCopy>* copies) const {
  std::byte* to = host_ + payload_;
  for (const DeviceTask* one : groups_[BatchGroups::kSums]) {
    const auto& task = std::get<SumTask>(*one);
    for (const SumTask::Term& term : task.terms) {
      if (term.payload.on_device()) continue;
      AddInPieces({to, term.payload.bytes().data(), term.payload.size(), nullptr}, most, copies);
      to += RoomOfTerm(task.elements, task.format);
    }
  }
}

// Terms that come from the host are in the order of AddArrivals.
void GpuStaging::PrepareSums() {
  DeviceSum* item = NewItems<DeviceSum>(BatchGroups::kSums);
  uint64_t& tiles = given_[BatchGroups::kSums].tiles;
  for (const DeviceTask* one : groups_[BatchGroups::kSums]) {
    const auto& task = std::get<SumTask>(*one);
    *item++ = {.to = twin_of_(task.to),
               .n = task.elements,
               .terms = OnDevice<const std::byte* const>(items_end_),
               .term_count = static_cast<int>(task.terms.size()),
               .format = task.format,
               .adds = task.adds,
               .first = task.first,
               .first_tile = tiles};
    tiles += kernels::TilesOf(task.elements);
    for (const SumTask::Term& term : task.terms) {
      const bool there = term.payload.on_device();
      *OnHost<const std::byte*>(items_end_) =
          there ? term.payload.bytes().data() : device_ + payload_ + arriving_bytes_;
      items_end_ += sizeof(std::byte*);
      if (!there) arriving_bytes_ += RoomOfTerm(task.elements, task.format);
    }
  }
  items_end_ = AlignPart(items_end_);
  if (arriving_bytes_ > 0) {
    gpu_->Copy(GpuDriver::Stream::kIn, device_ + payload_, host_ + payload_, arriving_bytes_);
  }
}

void GpuStaging::LaunchSums() {
  const auto tasks = groups_[BatchGroups::kSums];
  if (tasks.empty()) return;
  gpu_->Sum(ItemsOf<DeviceSum>(BatchGroups::kSums), static_cast<int>(tasks.size()), given_[BatchGroups::kSums].tiles);
}

void GpuStaging::AwaitSums() {
  gpu_->Record(summed_, GpuDriver::Stream::kCompute);
  gpu_->Wait(GpuDriver::Stream::kIn, summed_);
}

}  // namespace ballast
