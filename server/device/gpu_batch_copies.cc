// Copies between the GPU's memory and memory aside. What is saved goes by way of the stagings, so that kernels behind it
// run while the bus carries it; of a larger tensor than those hold, while it carries the last of it.
#include "server/device/gpu_batch.h"

namespace ballast {

void GpuStaging::AwaitSaves() {
  gpu_->Record(saved_, GpuDriver::Stream::kOut);
  gpu_->Wait(GpuDriver::Stream::kCompute, saved_);
}

// Copies in the kernels' stream, and so after the update before it and before the one behind it.
void GpuStaging::GiveCopy(const CopyTask& task) {
  if (task.saves) return GiveSave(task);
  AwaitSaves();
  for (const CopyTask::Piece& p : task.pieces) {
    if (p.bytes > 0) gpu_->Copy(GpuDriver::Stream::kCompute, p.to, p.from, p.bytes);
  }
  StartOut();
}

// The kernels behind it wait for the copy to the staging, and not for the bus.
void GpuStaging::GiveSave(const CopyTask& task) {
  const auto each = [&](auto copy) {
    uint64_t at = payload_;
    for (const CopyTask::Piece& p : task.pieces) {
      copy(p, device_ + at);
      at += RoomOfPiece(p.bytes);
    }
  };
  each([&](const CopyTask::Piece& p, std::byte* room) {
    gpu_->Copy(GpuDriver::Stream::kCompute, room, p.from, p.bytes);
  });
  StartOut();
  each([&](const CopyTask::Piece& p, std::byte* room) { gpu_->Copy(GpuDriver::Stream::kOut, p.to, room, p.bytes); });
}

}  // namespace ballast
