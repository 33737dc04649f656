// Where weights and state live and updates are computed. A device serves many runs, each by an in-order queue of its
// own; the queue that has been served the fewest bytes comes next (server/device/fair_queue.h). A step calls Submit
// once for each chunk or tensor.
//
//   ASSIGN_OR_RETURN(DeviceBuffer planes, device->Allocate(bytes, Place::kDevice));
//   ASSIGN_OR_RETURN(auto queue, device->NewQueue({.tiles = 1000}));
//   queue->Submit(EncodeWeightsTask{...}, [](const TaskResult&) {...});   // completed on a thread of the device
//
// To add a kind of device, derive from Device and open it in device_pool.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

#include "kernels/registry.h"
#include "server/device/gradient_sums.h"
#include "server/device/shared_memory.h"
#include "server/device/sum_task.h"

namespace ballast {

class Device;

// Which memory. kDevice: only tasks touch it. kHost: host memory that SumTasks write (gradients) and the device
// reads. kAside: host memory that CopyTasks write; the device can read it, slowly.
enum class Place { kDevice, kHost, kAside };

// Zeroed memory of a device, 64-byte aligned; every page has been touched, so that it is really there. A movable owner.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device* device, std::byte* data, uint64_t bytes) : device_(device), data_(data), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer();

  // The memory is no longer this owner's.
  std::byte* Release() { return std::exchange(data_, nullptr); }

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// One tensor's update, in one pass or two, as its kernel says; with update.dry it is only measured. `tiles` has room
// for all of the tensor's tiles until the task is done; between the passes it holds the sums of the first. Of a kernel
// over matrices it works on update.direction and `room` as well, which tensors share: it is submitted without a tensor.
struct UpdateTask {
  const kernels::Kernel* kernel = nullptr;
  kernels::Update update = {};
  kernels::TileStatistics* tiles = nullptr;
  float* room = nullptr;  // kernels::OrthogonalizingRoom numbers, of a kernel over matrices
  // The device has the gradient: an earlier task worked on this very one, or its sum is on_device (sum_task.h).
  bool there = false;
  // Of update.grad, made first, once; of the rest, or all where it is nullptr, earlier tasks made them.
  std::shared_ptr<GradientSums> sums = nullptr;
};
// The statistics of a gradient before any update and clipping, as in kernels::WireFormat::measure. `tiles` as in
// UpdateTask.
struct MeasureTask {
  const std::byte* gradient = nullptr;
  kernels::WireIndex format = 0;
  uint64_t elements = 0;
  float scale = 1;
  kernels::TileStatistics* tiles = nullptr;
  bool there = false;  // as in UpdateTask
};
// One tensor's curvature probe, by a kernel that has one. `tiles` has room for all of the tensor's sampled tiles until
// the task is done; probe.before is memory of the device.
struct CurvatureTask {
  const kernels::Kernel* kernel = nullptr;
  kernels::CurvatureProbe probe = {};
  kernels::TileCurvature* tiles = nullptr;
  bool there = false;  // as in UpdateTask
};
// Computes the scales that the master is served with: for each row of `row_length` elements its largest |weight|.
struct ScaleTask {
  const kernels::MasterFormat* master = nullptr;
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  uint64_t elements = 0, row_length = 0;
  float* scales = nullptr;  // elements / row_length
  bool from_aside = false;  // the planes are kAside memory
};
// Encodes elements [first, last) of the master into caller memory, copies the scales that they need, if any, and computes
// the checksum of what it encoded. Or into memory of the device that is shared (shared_memory.h), with room for whole rows of
// kernels::kPad elements; then without a checksum.
struct EncodeWeightsTask {
  const kernels::MasterFormat* master = nullptr;
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  kernels::WireIndex format = 0;
  uint64_t first = 0, last = 0;
  std::byte* out = nullptr;
  const float* scales = nullptr;  // of the tensor, made by a ScaleTask; nullptr: the format has none
  uint64_t row_length = 0;
  float* scales_out = nullptr;
  uint32_t* crc32c = nullptr;  // not wanted
  bool out_on_device = false;  // `out` is shared memory of the device; scales_out is not
  bool from_aside = false;     // as in ScaleTask
};
// Decodes caller memory into elements [first, last) of the master.
struct LoadTask {
  const kernels::MasterFormat* master = nullptr;
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  kernels::WireIndex format = 0;
  uint64_t first = 0, last = 0;
  const std::byte* in = nullptr;
};
// Moves elements [first, last) of an average of the master's weights; first is a multiple of the tile.
struct AverageTask {
  const kernels::MasterFormat* master = nullptr;
  kernels::Average average = {};
  uint64_t first = 0, last = 0;
};
// Copies between kDevice and kAside memory, either way.
struct CopyTask {
  struct Piece {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    uint64_t bytes = 0;
  };
  std::array<Piece, kernels::kMaxPlanes> pieces = {};
  // From kDevice to kAside memory. While the bytes are on their way there, a device may do what comes behind, but for
  // copies and what is from_aside.
  bool saves = false;
};
using DeviceTask = std::variant<UpdateTask, MeasureTask, CurvatureTask, AverageTask, ScaleTask, EncodeWeightsTask,
                                LoadTask, CopyTask, SumTask>;

struct TaskResult {
  kernels::Statistics statistics = {};  // of an UpdateTask or MeasureTask
  kernels::Curvature curvature = {};    // of a CurvatureTask
  bool finite = true;                   // of a LoadTask; false: a NaN or infinity was met
  // That the device spent on the task, but for an update's sum; 0 of a SumTask or EncodeWeightsTask.
  double seconds = 0;
};

// Tasks of one run, done as if in the order submitted. Thread-safe. The destructor waits for the tasks submitted.
class DeviceQueue {
 public:
  using Completion = absl::AnyInvocable<void(const TaskResult&)>;
  virtual ~DeviceQueue() = default;
  // Never blocks. `done` runs after the task; the queue's next may have been done already, and its `done` comes later.
  // tensor: whose planes and gradient the task works on, and nothing else but `tiles`: what is of different tensors may be
  // done at once. None: it may work on anything.
  void Submit(DeviceTask task, Completion done, std::optional<uint32_t> tensor = std::nullopt) {
    Enqueue(std::move(task), std::move(done), tensor);
    Wake();
  }
  // As Submit, of one of many small tasks: a device that sleeps is woken when much waits, and must be woken by Wake after
  // the last, once for all of them.
  virtual void Enqueue(DeviceTask task, Completion done, std::optional<uint32_t> tensor) = 0;
  virtual void Wake() = 0;
  virtual void WaitIdle() = 0;
};

// The most that a queue's tasks may need: their staging is reserved when the queue is made.
struct QueueNeeds {
  uint64_t tiles = 0;  // in an update or a measurement, or sampled tiles in a probe
  uint64_t payload_bytes =
      0;                  // in a load or a EncodeWeightsTask, without scales, or a term of a SumTask that is on_device
  uint64_t scales = 0;    // in a EncodeWeightsTask
  uint64_t elements = 0;  // of all tensors: more than those are not encoded at once
  bool averages = false;  // there are AverageTasks
};

// Thread-safe. Outlives its buffers and queues.
class Device {
 public:
  virtual ~Device() = default;
  // RESOURCE_EXHAUSTED when the machine refuses; admission against the configured limit comes before.
  virtual absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes, Place place) = 0;
  // RESOURCE_EXHAUSTED as in Allocate.
  virtual absl::StatusOr<std::unique_ptr<DeviceQueue>> NewQueue(const QueueNeeds& needs) = 0;
  // Zeroed memory of the device that another process may use too. UNIMPLEMENTED: the device's is the host's;
  // FAILED_PRECONDITION says why this one's cannot be shared; RESOURCE_EXHAUSTED as in Allocate.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> Export(uint64_t bytes);
  virtual std::string description() const = 0;  // one line for people
  virtual std::string label() const = 0;        // for metrics: cpu, cuda:0
  virtual uint64_t memory_bytes() const = 0;    // in all
  // CUDA's number of it in this process, which CUDA_VISIBLE_DEVICES decides; none: it is no GPU.
  virtual std::optional<int> cuda_number() const { return std::nullopt; }
  virtual bool on_host() const = 0;  // its memory is the host's: kAside is part of it
  virtual uint64_t allocated_bytes() const = 0;
  virtual uint64_t shared_bytes() const { return 0; }  // of those, what is exported
  virtual double busy_s() const = 0;                   // for how long the task in hand has been running; 0 when idle
  // What the bits of updates by a kernel over matrices depend on: library, version and kind of processor. FAILED_PRECONDITION
  // says why it can do none.
  virtual absl::StatusOr<std::string> MatrixProducts() = 0;

  // A device that fails for good tells the watcher why, once, from a thread of its own; one that has already failed
  // tells it at once. Tasks not yet done, and later ones, are dropped with their completions, and all queues are idle.
  // The watcher must not block. nullptr: takes the watcher away; no call to it is under way when this returns.
  using Watcher = absl::AnyInvocable<void(const absl::Status& why)>;
  virtual void Watch(Watcher watcher) = 0;

 private:
  friend class DeviceBuffer;
  virtual void Free(std::byte* data, uint64_t bytes) = 0;
};

inline absl::StatusOr<std::unique_ptr<SharedMemory>> Device::Export(uint64_t) {
  return absl::UnimplementedError("the daemon's device is the host's processors");
}

inline std::vector<std::string> DeviceLabels(const std::vector<Device*>& devices) {
  std::vector<std::string> labels;
  for (const Device* device : devices) labels.push_back(device->label());
  return labels;
}

inline DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) device_->Free(data_, bytes_);
}

}  // namespace ballast
