// A run's weights, optimizer state, and averages of the weights. On each of the run's devices it has the planes of that
// shard's tensors, in allocations by kind, and a queue; and it counts each tensor's updates. Everything that reads or writes the planes is
// a task on the shard's queue, so each task of a tensor sees what earlier tasks of that tensor did.
//
// The store of an amended run takes the planes of the store before it over as they lie, so that no weight is there twice,
// and has allocations of its own for what was added. Where a tensor is stored otherwise from now on, it has them also for
// all that came to the run with that tensor, and makes them from the planes before: until those go, both are there.
//
// Strand-confined. Completions run on the strand. Nothing here is allocated after Create except completions.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/base/strand.h"
#include "server/device/device.h"
#include "server/plan/plan.h"
#include "server/spec/run_spec.h"
#include "server/store/completions.h"
#include "server/store/weight_piece.h"
#include "server/store/weight_series.h"

namespace ballast {

// Elements [first, last) of a tensor. Of what is loaded, first is a multiple of the tile; what is encoded or decoded
// may begin and end anywhere in one chunk, but where there are scales: then it is a whole chunk.
struct TensorRange {
  uint32_t tensor = 0;
  uint64_t first = 0, last = 0;
};

// Host memory for a copy of all of a run's weights and state, or of one tensor's. A movable owner.
struct StoreImage {
  std::vector<DeviceBuffer> shards;   // as the store's: weights, momentum, variance, averages
  std::optional<uint32_t> only = {};  // this tensor's planes are in shards[0], and nothing else
  uint64_t bytes() const;
};

// The index of a kind in arrays by kind.
constexpr size_t Index(kernels::PlaneKind kind) { return static_cast<size_t>(kind); }

inline const kernels::Kernel& KernelOf(const RunSpec& spec, uint32_t tensor) {
  return *spec.groups[spec.tensors[tensor].group].kernel;
}
// As in server/spec/carry_over.h, of this tensor.
const kernels::MomentCodec* StateCodec(const RunSpec& spec, uint32_t tensor, kernels::PlaneKind kind);

// Host memory in which state is brought from the device before it is decoded; it grows to what is asked for. A movable
// owner.
struct StateRoom {
  DeviceBuffer memory;
  uint32_t shard = 0;  // whose device it is of
};

class ParameterStore {
 public:
  // How many updates of a tensor were submitted.
  struct UpdateCount {
    uint64_t updates = 0;
    uint64_t step = 0;      // of the last; 0: none
    bool averaged = false;  // its averages have begun; until then they are copies of the weights that were loaded
    bool operator==(const UpdateCount&) const = default;
  };
  using Done = Completions::Done;
  // The values of one update.
  struct UpdateValues {
    uint64_t step = 0;
    double gradient_divisor = 1;  // loss scale, and the number of ranks where their mean is wanted
    float clip = 1;               // of the unscaled gradient
    kernels::StatisticsLevel statistics = kernels::StatisticsLevel::kCore;
    absl::Span<const double> hyper;  // the group's, in the kernel's order, before the tensor's lr_scale and wd_scale
    const std::byte* gradient = nullptr;
    kernels::WireIndex gradient_format = 0;
    bool measured = false;      // an earlier Measure, DryUpdate or Curvature has read this gradient already
    bool summed_there = false;  // its sums were on_device (sum_task.h)
  };
  struct Environment {
    const RunSpec* spec;  // outlives the store, like the rest
    const Plan* plan;
    std::vector<Device*> devices;  // by shard
    Strand* strand;
    // Whose place this store takes: its tensors come first here, in the same shards. Until TakeOver, which comes before
    // anything else, nobody writes to its planes.
    const ParameterStore* past = nullptr;
  };

  // RESOURCE_EXHAUSTED: a device has no room. INVALID_ARGUMENT names a tensor of `past` with a value that its new format
  // cannot hold.
  static absl::StatusOr<std::unique_ptr<ParameterStore>> Create(Environment environment);
  ~ParameterStore();
  // Once: the environment's `past`, which is idle, gives up the planes that stay, and is good for nothing afterwards.
  void TakeOver(ParameterStore* past);
  // What a store of this spec, of which this one is the past, would take over as it lies, by shard. Thread-safe, but for
  // TakeOver.
  std::vector<uint64_t> StayingBytes(const RunSpec& next) const;

  // Makes the sum of some of the tensor's gradient: later calls of that tensor find it there.
  void Sum(uint32_t tensor, SumTask sum, Done done);
  // `done` once the tensor's sums before it are made.
  void WhenSummed(uint32_t tensor, Done done);
  // Then moves the tensor's averages, as Average does. `sums`: of all of the gradient, made first; nullptr: Sum was called.
  void Update(uint32_t tensor, const UpdateValues& values, Done done, std::shared_ptr<GradientSums> sums = nullptr);
  // Moves the tensor's averages towards its weights, at the end of this step, which has not updated it. The first time
  // they become copies of the weights.
  void Average(uint32_t tensor, uint64_t step);
  // Measures the gradient of these values, unscaled, before any clipping. The weights are not touched.
  void Measure(uint32_t tensor, const UpdateValues& values, Done done);
  // The core statistics that an Update with these values would give now. Touches neither the weights, nor the state,
  // nor the count of updates.
  void DryUpdate(uint32_t tensor, const UpdateValues& values, Done done);
  // Probes the curvature along the tensor's last update, as in kernels::Kernel::curvature, and keeps the gradient for
  // the next probe. To be called in every step before the Update or the skip, where ProbesCurvature (run_spec.h). The
  // sums are 0 unless exactly one Update, and nothing else, came between this call and the one before it. Betas and eps
  // of `values` are taken for the last update's too.
  void Curvature(uint32_t tensor, const UpdateValues& values, Done done);
  // Encodes weights in the tensor's serving format, with the scales of its present weights, into `out`, which stays
  // valid until done, is resized to fit, and sealed. `image`: encodes the weights saved there, before this call, instead.
  // An average goes as weights do, and weights in the series' format as in a serving format.
  void EncodeWeights(TensorRange range, WeightPiece* out, Done done, const StoreImage* image = nullptr,
                     WeightSeries series = {});
  // As EncodeWeights, but in fp32, without scales: all that the store has of the weights, rounded where the master
  // format has more than fp32.
  void EncodeMaster(TensorRange range, WeightPiece* out, Done done, const StoreImage* image = nullptr,
                    WeightSeries series = {});
  // Decodes momentum or variance that has a StateCodec into `out`, in fp32, by way of `room`; both stay valid until
  // done. RESOURCE_EXHAUSTED, and `done` is not called: the device has no room.
  absl::Status DecodeState(TensorRange range, kernels::PlaneKind kind, WeightPiece* out, StateRoom* room, Done done,
                           const StoreImage* image = nullptr);
  // `in` stays valid until done. Averages begin anew, as copies of what is loaded, rounded to nearest.
  void Load(TensorRange range, kernels::WireIndex format, const std::byte* in, Done done);
  // Loads momentum or variance that has a StateCodec, rounded to nearest, or as it was where it was decoded from such
  // codes (exact_codes.h); encodes it before it returns.
  // INVALID_ARGUMENT, and nothing is loaded: a value is not finite, is too large for the format, or is a negative
  // variance. RESOURCE_EXHAUSTED: the device has no room to copy from.
  absl::Status LoadState(TensorRange range, kernels::PlaneKind kind, kernels::WireIndex format, const std::byte* in,
                         Done done);
  // Says how many updates the tensor's loaded state has seen.
  void SetUpdates(uint32_t tensor, uint64_t updates);
  // Whether LoadState or SetUpdates was called for the tensor.
  bool state_loaded(uint32_t tensor) const { return spots_[tensor].state_loaded; }
  // Puts all state that was loaded back to that of a new run: zeros, after no updates. RESOURCE_EXHAUSTED as above.
  absl::Status ForgetLoadedState();

  absl::StatusOr<StoreImage> NewImage() const;
  absl::StatusOr<StoreImage> NewImage(uint32_t only) const;
  // Copies the tensor into the image, as earlier tasks leave it. The image must not move until done.
  void Save(uint32_t tensor, StoreImage* image, Done done);
  // Where the image has the plane, without its padding. Thread-safe.
  absl::Span<std::byte> SavedPlane(const StoreImage& image, uint32_t tensor, size_t plane) const;
  // The image is about to be filled otherwise than by Save.
  void Forget(const StoreImage* image);
  // Copies the tensor back from the image; later tasks find it so.
  void Restore(uint32_t tensor, const StoreImage& image, const UpdateCount& count);
  UpdateCount count(uint32_t tensor) const { return {updates_[tensor], step_of_[tensor], averaged_[tensor]}; }
  // A number that changes with the tensor's weights, also when a rewind makes the same step twice or weights are loaded
  // again.
  uint64_t version(uint32_t tensor) const { return versions_[tensor]; }

  // Called, on the strand, before anything is submitted that changes a tensor's weights, or begins to.
  void set_before_change(std::function<void(uint32_t tensor)> before) { before_change_ = std::move(before); }

  // Step of the tensor's last submitted update; 0: none.
  uint64_t step_of(uint32_t tensor) const { return step_of_[tensor]; }
  // Number of the tensor's submitted updates.
  uint64_t updates(uint32_t tensor) const { return updates_[tensor]; }
  // Counted from the live allocations. Padding is not: it is a property of the layout.
  PlanBytes bytes() const;
  void WaitIdle() const;
  // Whether some completion has neither run nor been dropped. Completions that run may submit more.
  bool awaits_completions() const { return completions_.awaited(); }

 private:
  // The planes of the tensors that came to the run together.
  struct Part {
    std::array<DeviceBuffer, kernels::kPlaneKinds> buffers;  // by kind
    uint64_t image_begin = 0;  // in the shard's image, where the kinds lie one after another
    uint64_t bytes() const {
      uint64_t sum = 0;
      for (const DeviceBuffer& buffer : buffers) sum += buffer.bytes();
      return sum;
    }
  };
  // What one device holds.
  struct Shard {
    std::vector<Part> parts;             // none is empty; as many as there are tensors, at most
    DeviceBuffer tiles;                  // statistics scratch of the update in hand
    DeviceBuffer scales;                 // that tensors are served with
    DeviceBuffer kept;                   // sampled gradients of the last curvature probes
    DeviceBuffer matrix;                 // of the update in hand, where that is over a matrix
    std::unique_ptr<DeviceQueue> queue;  // last: its destructor waits for tasks that use the above
  };
  struct Spot {
    size_t part = 0;                                        // of the shard
    std::array<uint64_t, kernels::kMaxPlanes> offset = {};  // of each of the kernel's planes in its kind's buffer
    uint64_t first_average = 0;                             // where its averages' planes begin, one after another
    uint64_t first_scale = 0;                               // in the shard's
    const void* scales_of = nullptr;                        // the store's as it is, an image's, or nobody's
    WeightSeries scales_series = {};                        // and of which of its weights, in which format
    bool state_loaded = false;
    uint64_t first_kept = 0;                  // in the shard's, in bytes
    std::optional<uint64_t> kept_after = {};  // updates when the gradient was kept; none: it is of no use
  };

  explicit ParameterStore(Environment environment);
  // Copies zeros over its moments, as many at a time as there are.
  void ClearState(uint32_t tensor, const std::shared_ptr<const DeviceBuffer>& zeros);
  // Update number t of the tensor.
  UpdateTask MakeUpdate(uint32_t tensor, const UpdateValues& values, uint64_t t);
  // What it needs beside that where it is over a matrix.
  void TakeMatrix(uint32_t tensor, UpdateTask* task) const;
  using KindBytes = std::array<uint64_t, kernels::kPlaneKinds>;
  // `own`: of the tensors that do not stay.
  absl::Status Allocate(const ShardPlan& plan, const KindBytes& own, Device* device, Shard* shard) const;
  // Returns what the tensors that do not stay take, by shard.
  std::vector<KindBytes> LayOut();
  // By shard and part: whether a store of this spec takes it over as it lies.
  std::vector<std::vector<bool>> StayingParts(const RunSpec& next) const;
  // By tensor of `next`: whether it is in such a part.
  std::vector<bool> Staying(const RunSpec& next) const;
  // Makes what `past` has and does not stay, in planes of this store.
  absl::Status CarryOver(const ParameterStore& past);
  absl::Status CarryOver(const ParameterStore& past, uint32_t tensor, kernels::PlaneKind kind);
  absl::Status CopyPlanes(const ParameterStore& past, uint32_t tensor, kernels::PlaneKind kind);
  absl::Status ConvertWeights(const ParameterStore& past, uint32_t tensor);
  absl::Status ConvertState(const ParameterStore& past, TensorRange range, kernels::PlaneKind kind);
  // Waits until the tensor's shard has done it. UNAVAILABLE: the device has failed.
  absl::Status DoNow(uint32_t tensor, DeviceTask task);
  // What is submitted next changes the tensor.
  void Change(uint32_t tensor) {
    if (before_change_) before_change_(tensor);
    ++versions_[tensor];
  }
  Shard& ShardOf(uint32_t tensor) { return shards_[environment_.plan->placement.shard_of[tensor]]; }
  const Shard& ShardOf(uint32_t tensor) const { return shards_[environment_.plan->placement.shard_of[tensor]]; }
  // An update's: what is of a matrix works on what tensors share.
  void SubmitUpdate(uint32_t tensor, UpdateTask task, Done done);
  void MoveAverages(uint32_t tensor, uint64_t step);
  // Of elements [first, last), first a multiple of the tile.
  void SubmitAverages(TensorRange range, uint64_t step, bool begins);
  // The pieces, by plane of the tensor, as many tasks as they need; `done` hears the seconds of all.
  template <class PieceOf>
  void SubmitCopies(uint32_t tensor, bool saves, PieceOf piece_of, DeviceQueue::Completion done);
  // On the tensor's queue, whose device is woken once for all that the strand submits in this turn.
  void Submit(uint32_t tensor, DeviceTask task, DeviceQueue::Completion done);
  void Submit(uint32_t tensor, DeviceTask task, DeviceQueue::Completion done, std::optional<uint32_t> works_on);
  // The whole tiles that the range lies in: what devices encode and decode.
  TensorRange TilesAround(TensorRange range) const;
  // Cuts what was encoded of the tiles to the range, and seals it, on the device's thread; then `done`.
  DeviceQueue::Completion CutAndSeal(TensorRange range, TensorRange tiles, uint64_t element_bytes, WeightPiece* out,
                                     Done done);
  // What follows an EncodeWeightsTask of the tiles, which computes the checksum of what it encodes: CutAndSeal where that
  // is more than the range.
  DeviceQueue::Completion WhenEncoded(TensorRange range, TensorRange tiles, uint64_t element_bytes, WeightPiece* out,
                                      Done done);
  // What the weights of a series are kept in.
  const kernels::MasterFormat& MasterOf(uint32_t tensor, WeightSeries series) const;
  // The planes a master reads: the kernel's planes that hold weights, or the average's, in order.
  std::array<std::byte*, kernels::kMaxPlanes> MasterPlanes(uint32_t tensor, const StoreImage* image = nullptr,
                                                           WeightSeries series = {}) const;
  // By plane of StoredPlanes (server/spec/stored_planes.h). Its place among those of its kind, in bytes.
  uint64_t OffsetOf(uint32_t tensor, size_t plane) const;
  kernels::PlaneKind KindOf(uint32_t tensor, size_t plane) const;
  std::byte* PlaneAt(uint32_t tensor, size_t plane) const;
  std::byte* PlaneIn(const StoreImage& image, uint32_t tensor, size_t plane) const;
  kernels::TileStatistics* TilesOf(uint32_t tensor) const;
  // The tensor's scales. If those there are not of its present weights, a task is submitted first that computes them.
  float* PresentScales(uint32_t tensor, const StoreImage* image, WeightSeries series);

  const Environment environment_;
  const std::vector<bool> stays_;  // by tensor: its planes come with TakeOver
  Completions completions_;
  std::vector<Spot> spots_;  // by tensor, like those that follow
  std::vector<uint64_t> versions_;
  std::function<void(uint32_t)> before_change_;
  std::vector<uint64_t> updates_;
  std::vector<uint64_t> step_of_;
  std::vector<bool> averaged_;
  std::vector<double> hyper_;  // scratch of Update
  std::vector<Shard> shards_;
  std::atomic<bool> wakes_ = false;  // posted; tests submit beside the strand, too
};

}  // namespace ballast
