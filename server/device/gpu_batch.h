// Tasks that go to a GPU together, and the staging they go through: room for one batch at a time, with the same layout
// in pinned host memory and on the GPU. Give() writes the kernels' arguments, copies in what they need, launches them
// and copies out what they make, all in the GPU's streams; when the event out() has happened, Take() reads the results.
// Results are copied out of the staging alone, so later kernels may write anywhere else.
//
// Neither call blocks on the GPU. Give() for one staging comes after Take() of its last batch; no other locks are
// needed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "server/device/device.h"
#include "server/device/gpu_driver.h"

namespace ballast {

class GpuStaging {
 public:
  static constexpr size_t kMostTasks = 256;  // of a batch

  // Where the GPU's copy of a pinned byte is.
  using TwinOf = std::function<std::byte*(const void*)>;

  GpuStaging(GpuDriver* gpu, const QueueNeeds& needs, TwinOf twin_of);
  ~GpuStaging();
  GpuStaging(const GpuStaging&) = delete;
  absl::Status Reserve();
  uint64_t bytes() const { return end_; }  // on the GPU, and as many on the host

  // Whether `next` can join the tasks of a batch in one launch.
  bool Fits(std::span<const DeviceTask* const> batch, const DeviceTask& next) const;
  // Of an empty batch, out() happens after all that was given before.
  void Give(std::span<const DeviceTask* const> batch);
  // The result of the batch's task number i. Copies the bytes of a EncodeWeightsTask to where it wants them.
  TaskResult Take(std::span<const DeviceTask* const> batch, size_t i);
  GpuDriver::Event out() const { return out_; }

  bool busy = false;  // from Give to the last Take; the owner's

 private:
  void GiveTasks(std::span<const DeviceTask* const> batch);
  // UpdateTask, MeasureTask or CurvatureTask: tasks that read a gradient and are answered by tiles of numbers.
  template <class Task>
  void GiveGradients(std::span<const DeviceTask* const> batch);
  void GiveServes(std::span<const DeviceTask* const> batch);
  void GiveLoad(const LoadTask& task);
  void GiveScales(const ScaleTask& task);
  void GiveCopy(const CopyTask& task);
  void StartCompute(uint64_t item_bytes);
  void StartOut();
  void CopyOut(uint64_t at, uint64_t bytes);
  template <class T>
  T* OnHost(uint64_t at) const {
    return reinterpret_cast<T*>(host_ + at);
  }
  template <class T>
  T* OnDevice(uint64_t at) const {
    return reinterpret_cast<T*>(device_ + at);
  }

  GpuDriver* const gpu_;
  const TwinOf twin_of_;
  const uint64_t tile_capacity_, payload_capacity_;
  // Where the parts begin; a load's flag is at 0.
  uint64_t items_ = 0, tiles_ = 0, sums_ = 0, payload_ = 0, scales_ = 0, end_ = 0;
  std::byte *host_ = nullptr, *device_ = nullptr;
  GpuDriver::Event in_ = 0, computed_ = 0, out_ = 0;
};

}  // namespace ballast
