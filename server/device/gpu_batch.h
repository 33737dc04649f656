// Tasks that go to a GPU together, and the staging they go through: room for one batch at a time, with the same
// layout in pinned host memory and on the GPU. Begin() and Join() put a batch together. Give() writes the kernels'
// arguments, copies in what they need, launches them and copies out what they make, all in the GPU's streams; when
// the event out() has happened, Take() reads the results, and AddCopies() says which bytes of the staging belong
// where. Results are copied out of the staging alone, so later kernels may write anywhere else.
//
// No call blocks on the GPU. Begin() comes after the last Take() of the batch before; no other locks are needed.
// Tasks are not copied: they stay where they are until then.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

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
  // Of a CopyTask that saves: what its pieces may take, each RoomOfPiece.
  uint64_t save_capacity() const { return payload_capacity_; }
  static uint64_t RoomOfPiece(uint64_t bytes);

  // An empty batch. Given so, out() happens after all that was given before.
  void Begin();
  // Whether the task can be launched together with those that the batch has; the first one always can.
  bool CanJoin(const DeviceTask& task) const;
  void Join(const DeviceTask* task);
  std::span<const DeviceTask* const> tasks() const { return tasks_; }
  void Give();
  // The result of the batch's next task, from the first on.
  TaskResult Take();
  // Adds, of the batch's EncodeWeightsTasks, the copies that bring their bytes to where they want them: for the caller to
  // make, in any order. None is longer than `most` bytes, except where a checksum of all that it copies is wanted.
  struct HostCopy {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;
    uint32_t* crc32c;  // nullptr: not wanted
  };
  void AddCopies(uint64_t most, std::vector<HostCopy>* copies) const;
  GpuDriver::Event out() const { return out_; }

  bool busy = false;  // from Begin to the last Take; the owner's

 private:
  // What a task takes of the staging's room.
  struct Room {
    uint64_t tiles = 0, payload_bytes = 0;
  };
  static Room RoomOf(const DeviceTask& task);
  void GiveTasks();
  // UpdateTask, MeasureTask or CurvatureTask: tasks that read a gradient and are answered by tiles of numbers.
  template <class Task>
  void GiveGradients();
  void BringGradients();
  void GiveServes();
  void GiveLoad(const LoadTask& task);
  void GiveScales(const ScaleTask& task);
  void GiveCopy(const CopyTask& task);
  void GiveSave(const CopyTask& task);
  // What was saved before is to be read, or written over.
  void AwaitSaves();
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
  GpuDriver::Event in_ = GpuDriver::kNoEvent, computed_ = GpuDriver::kNoEvent, saved_ = GpuDriver::kNoEvent,
                   out_ = GpuDriver::kNoEvent;

  struct Gradient {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;
  };
  std::vector<Gradient> gradients_;       // that the GPU does not have yet; empty but in GiveGradients
  std::vector<const DeviceTask*> tasks_;  // the batch
  std::vector<const void*> tensors_;      // their planes, where none may be there twice
  Room room_;                             // that they take
  size_t taken_ = 0;                      // tasks whose results were
  uint64_t taken_tiles_ = 0;              // and theirs
};

}  // namespace ballast
