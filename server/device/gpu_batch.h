// Tasks that go to a GPU together (batch_groups.h), and the staging they go through: room for one batch at a time, with the
// same layout in pinned host memory and on the GPU. Begin() and Join() put a batch together; AddArrivals() says what of the
// terms of its sums is to be copied to the staging before Give(). That writes the kernels' arguments, copies in what they
// need, launches them and copies out what they make, all in the GPU's streams; when the event out() has happened, Take()
// reads the results, and AddCopies() says which bytes of the staging belong where. Results are copied out of the staging
// alone, so later kernels may write anywhere else.
//
// No call blocks on the GPU. Begin() comes after the last Take() of the batch before; no other locks are needed.
// Tasks are not copied: they stay where they are until then.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "server/device/batch_groups.h"
#include "server/device/device.h"
#include "server/device/gpu_driver.h"

namespace ballast {

class GpuStaging {
 public:
  // Where the GPU's copy of a pinned byte is.
  using TwinOf = std::function<std::byte*(const void*)>;

  GpuStaging(GpuDriver* gpu, const QueueNeeds& needs, TwinOf twin_of);
  ~GpuStaging();
  GpuStaging(const GpuStaging&) = delete;
  absl::Status Reserve();
  uint64_t bytes() const { return end_; }  // on the GPU, and as many on the host
  // What the pieces of a CopyTask that saves may take, each RoomOfPiece, or the terms of a SumTask that are in host memory, each
  // RoomOfTerm.
  uint64_t payload_capacity() const { return capacity_.payload_bytes; }
  static uint64_t RoomOfPiece(uint64_t bytes);

  // An empty batch. Given so, out() happens after all that was given before.
  void Begin();
  bool CanJoin(const DeviceTask& task) const { return groups_.CanJoin(task); }
  void Join(const DeviceTask* task) { groups_.Join(task); }
  // Copies that the caller makes, in any order. None is longer than `most` bytes, except where a checksum of all that it copies
  // is wanted.
  struct HostCopy {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;
    uint32_t* crc32c;  // nullptr: not wanted
  };
  // Adds those that bring the terms of the batch's sums here.
  void AddArrivals(uint64_t most, std::vector<HostCopy>* copies) const;
  // *summed: whether sums that were given to the queue's stagings may be under way; set where the batch has some.
  void Give(bool* summed);
  // The result of the batch's next task, in the order in which they joined.
  TaskResult Take(const DeviceTask& task);
  // Adds, of the batch's EncodeWeightsTasks, those that bring their bytes to where they want them.
  void AddCopies(uint64_t most, std::vector<HostCopy>* copies) const;
  GpuDriver::Event out() const { return out_; }

  bool busy = false;  // from Begin to the last Take; the owner's

 private:
  // The kernels' arguments of each group that the batch has, before any of them is launched.
  void Prepare();
  // Calls what.operator()<Task>() with the kind of those of the batch that read a gradient and are answered by tiles of
  // numbers, if it has any: UpdateTask, MeasureTask or CurvatureTask.
  template <class Do>
  void OfKindOfGradients(Do what) const;
  void PrepareSums();
  template <class Task>
  void PrepareGradients();
  void PrepareAverages();
  void PrepareScales();
  void PrepareServes();
  void Launch();
  void LaunchSums();
  void LaunchAverages();
  void LaunchScales();
  void LaunchServes();
  void BringGradients();
  void GiveAlone(const DeviceTask& task);
  void GiveLoad(const LoadTask& task);
  void GiveCopy(const CopyTask& task);
  void GiveSave(const CopyTask& task);
  // What was saved before is to be read, or written over.
  void AwaitSaves();
  // What was summed before is to be written over from the host: sums of a step that came to nothing, say.
  void AwaitSums();
  void StartCompute();
  void StartOut();
  void CopyOut(uint64_t at, uint64_t bytes);
  static void AddInPieces(const HostCopy& copy, uint64_t most, std::vector<HostCopy>* copies);
  template <class T>
  T* OnHost(uint64_t at) const {
    return reinterpret_cast<T*>(host_ + at);
  }
  // Room for the arguments of a group's tasks.
  template <class Item>
  Item* NewItems(BatchGroups::Group group) {
    given_[group] = {.items = items_end_};
    items_end_ += AlignPart(groups_[group].size() * sizeof(Item));
    return OnHost<Item>(given_[group].items);
  }
  template <class Item>
  Item* ItemsOf(BatchGroups::Group group) const {
    return OnDevice<Item>(given_[group].items);
  }
  template <class T>
  T* OnDevice(uint64_t at) const {
    return reinterpret_cast<T*>(device_ + at);
  }

  GpuDriver* const gpu_;
  const TwinOf twin_of_;
  const BatchRoom capacity_;
  // Where the parts begin; a load's flag is at 0.
  uint64_t items_ = 0, tiles_ = 0, sums_ = 0, payload_ = 0, scales_ = 0, end_ = 0;
  std::byte *host_ = nullptr, *device_ = nullptr;
  GpuDriver::Event in_ = GpuDriver::kNoEvent, computed_ = GpuDriver::kNoEvent, saved_ = GpuDriver::kNoEvent,
                   summed_ = GpuDriver::kNoEvent, out_ = GpuDriver::kNoEvent;

  struct Gradient {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes;
  };
  std::vector<Gradient> gradients_;  // that the GPU does not have yet; empty but in Prepare
  BatchGroups groups_{capacity_};    // the batch
  // Of a group: where its kernels' arguments begin, and the tiles they work on.
  struct Given {
    uint64_t items = 0, tiles = 0;
  };
  std::array<Given, BatchGroups::kGroups> given_;
  uint64_t items_end_ = 0;
  bool reads_aside_ = false;     // memory that a batch before may still be saving to
  uint64_t arriving_bytes_ = 0;  // of its sums' terms, at payload_; what the batch makes is behind them
  // What the batch makes.
  uint64_t tile_bytes_ = 0, payload_bytes_ = 0, scale_bytes_ = 0;
  uint64_t taken_tiles_ = 0;  // of tasks whose results were taken
};

}  // namespace ballast
