// Copies between the GPU's memory and memory aside: what is saved there takes the bus's time, and the kernels none of it.
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

// By way of the staging, which the kernels wait for, and not for the bus.
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
