// What a run will hold and move, to the byte, computed from its spec alone. The answer to Plan, the admission of a run
// and its allocations all use it. A run's live allocations are counted separately and must agree.
//
//   Plan plan = MakePlan(spec);
//   plan.bytes.total();
//
// A spec may name more than fits into 64 bits: the count is then kUncountable (base/saturating.h), and the run is
// refused.
//
// Pure functions, linear in the number of tensors whatever their sizes; thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "server/base/saturating.h"
#include "server/plan/placement.h"
#include "server/spec/run_spec.h"

namespace ballast {

// Bytes by kind, as in the message ByteCounts. `padding` is already part of what is stored. `snapshots`,
// `client_state` and `following` are in host memory, wherever the device is.
struct PlanBytes {
  uint64_t weights = 0, momentum = 0, variance = 0, gradients = 0, staging = 0, padding = 0, snapshots = 0,
           client_state = 0, following = 0, averages = 0;
  uint64_t stored() const { return Sum(Sum(weights, momentum), Sum(variance, averages)); }
  uint64_t on_device() const { return Sum(Sum(stored(), gradients), staging); }
  uint64_t beside_device() const { return Sum(Sum(snapshots, client_state), following); }
  uint64_t total() const { return Sum(on_device(), beside_device()); }
  PlanBytes& operator+=(const PlanBytes& other);
  PlanBytes& operator-=(const PlanBytes& other);
  bool operator==(const PlanBytes&) const = default;
};

// The kinds that make up the total, by the names that metrics and refusals have for them.
struct ByteKind {
  const char* name;
  uint64_t PlanBytes::*bytes;
  bool on_device;
};
inline constexpr ByteKind kByteKinds[] = {
    {"weights", &PlanBytes::weights, true},      {"momentum", &PlanBytes::momentum, true},
    {"variance", &PlanBytes::variance, true},    {"averages", &PlanBytes::averages, true},
    {"gradients", &PlanBytes::gradients, true},  {"staging", &PlanBytes::staging, true},
    {"snapshots", &PlanBytes::snapshots, false}, {"client_state", &PlanBytes::client_state, false},
    {"following", &PlanBytes::following, false},
};

struct GroupPlan {
  const kernels::Kernel* kernel = nullptr;
  uint64_t parameters = 0;
};

// What one device holds of the run.
struct ShardPlan {
  PlanBytes bytes = {};
  uint64_t pool_bytes = 0;        // of bytes.gradients: where gradients are summed
  uint64_t scales = 0;            // that its tensors are served with
  uint64_t kept_bytes = 0;        // of bytes.staging: sampled gradients that curvature probes keep
  uint64_t matrix_bytes = 0;      // of bytes.staging: the largest that is made orthogonal, and the room for that
  uint64_t statistics_tiles = 0;  // of its largest tensor: its tasks are done one at a time
};

struct Plan {
  uint64_t parameters = 0;
  uint64_t tensors = 0;
  uint64_t chunk_elements = 0;
  PlanBytes bytes = {};  // of all shards
  Placement placement = {};
  // By shard. The first also counts host memory: the ranks' send buffers, their windows of gradients that wait to be
  // summed, the accounts of those gradients, what readers hold, and the ranks' client_state.
  std::vector<ShardPlan> shards = {};
  std::vector<GroupPlan> groups = {};
  uint64_t push_bytes = 0;     // gradients of a step
  uint64_t pull_bytes = 0;     // weights of a step
  uint64_t journal_bytes = 0;  // gradients that a step writes to the journal; 0: there is none
  uint64_t trainer_weight_bytes = 0;
  uint64_t window_bytes = 0;   // for each rank's gradients that wait to be summed; slot_shape.h says where they are
  uint64_t account_bytes = 0;  // part of bytes.staging: accounts of the gradients that came (accounts.h), at most
  uint64_t copy_bytes = 0;     // of the largest tensor, of which a slow reader may be sent a copy
  uint64_t reader_chunk_bytes = 0;  // the most that a reader holds of a chunk: as it is sent, in fp32 where it is state
  uint64_t state_room_bytes = 0;    // and beside it, while state is decoded
  // The same of a tensor that is small as it is read, where some are: a reader holds kSmallSendBuffers of them.
  uint64_t small_reader_bytes = 0, small_reader_scales = 0, small_room_bytes = 0;
  uint64_t reader_bytes = 0;        // part of bytes.staging: what readers hold, and that copy, at most
  uint64_t send_buffer_bytes = 0;   // for each of SendBufferCount(spec) buffers
  uint64_t send_buffer_scales = 0;  // likewise
  uint64_t encoded_scales = 0;      // the most of a chunk, in whichever format it is served
  // For each of kSmallSendBuffers of a rank, and of digests, where some tensors are small.
  uint64_t small_buffer_bytes = 0, small_buffer_scales = 0;
};

// Planes and slabs begin on multiples of this.
inline constexpr uint64_t kAlignment = 64;
constexpr uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Part of bytes.staging, where there is a journal: what is not written yet.
inline constexpr uint64_t kJournalBuffers = uint64_t{16} << 20;
// A rank's stream has some in turn, so that many are encoded, which on a GPU takes several threads' turns, while one is
// written. Where there are many ranks, each has fewer: others' are encoded meanwhile. A run has one more, for digests.
inline constexpr uint64_t kLeastSendBuffers = 4, kMostSendBuffers = 16, kSendBuffersOfAllRanks = 128;
inline uint64_t SendBuffersOfARank(const RunSpec& spec) {
  return std::clamp(kSendBuffersOfAllRanks / spec.ranks, kLeastSendBuffers, kMostSendBuffers);
}
inline uint64_t SendBufferCount(const RunSpec& spec) { return spec.ranks * SendBuffersOfARank(spec) + 1; }
// Beside them a rank's stream has some for tensors that are small as they are sent, so that many of them are encoded, and
// go out, together.
inline constexpr uint64_t kSmallSendBuffers = 32, kSmallTensorBytes = 8 << 10, kSmallTensorScales = 256;
inline bool IsSentSmall(const TensorSpec& t) {
  return t.elements * WireBytes(t.serving_format) <= kSmallTensorBytes && ScaleCount(t) <= kSmallTensorScales;
}
// Likewise for a reader, who may want its weights or its state.
inline bool IsReadSmall(const TensorSpec& t) {
  return t.elements * sizeof(float) <= kSmallTensorBytes && ScaleCount(t) <= kSmallTensorScales;
}
// What buffers of both kinds take, the ranks' and those for digests.
inline uint64_t SendBufferBytes(const RunSpec& spec, const Plan& plan) {
  const uint64_t large = plan.send_buffer_bytes + plan.send_buffer_scales * sizeof(float);
  const uint64_t small = plan.small_buffer_bytes + plan.small_buffer_scales * sizeof(float);
  return Sum(Product(SendBufferCount(spec), large), Product((spec.ranks + 1) * kSmallSendBuffers, small));
}
// Readers that are served beside the ranks: ballastctl, an evaluation, a checkpoint. Readers that were cut off may hold
// a chunk until they are gone; as many of them are planned for.
inline constexpr uint64_t kMoreReaders = 4;
inline uint64_t ReaderCount(const RunSpec& spec) { return spec.ranks + kMoreReaders; }
inline uint64_t ReaderBufferCount(const RunSpec& spec) { return 2 * ReaderCount(spec); }
// Chunks that a rank may have sent beyond its credit: one when nothing else is under way, and one that sums wait for.
inline constexpr uint64_t kChunksBeyondCredit = 2;

inline uint64_t AlignedPlaneBytes(const kernels::Plane& plane, uint64_t elements) {
  return AlignUp(kernels::PlaneBytes(plane, elements));
}
// The bytes of a tensor's first `count` planes, one after another.
inline uint64_t StoredBytes(std::span<const kernels::Plane> planes, size_t count, uint64_t elements) {
  uint64_t bytes = 0;
  for (const kernels::Plane& plane : planes.first(count)) bytes = Sum(bytes, AlignedPlaneBytes(plane, elements));
  return bytes;
}
// What a tensor's gradient takes in the pool: as it came, or as a sum.
inline kernels::WireIndex SlabFormat(const RunSpec& spec, const TensorSpec& t) {
  return SumsGradients(spec) ? kernels::FindWireFormat("fp32") : t.gradient_format;
}
inline uint64_t SlabBytes(const RunSpec& spec, const TensorSpec& t) {
  return AlignUp(t.elements * WireBytes(SlabFormat(spec, t)));
}

// Scales that a tensor has room for on its device: as many as it is served with, or followed in, whatever needs most.
uint64_t ScaleRoom(const RunSpec& spec, const TensorSpec& t);

// The scales that a tensor's chunks are sent with, when it is served with some.
struct ChunkScales {
  uint64_t most = 0;  // of one chunk
  uint64_t all = 0;   // of all chunks: a row that is cut counts in each that has a part of it
};
ChunkScales ScalesOfChunks(const RunSpec& spec, const TensorSpec& t);

// The most client_state that one StepEnd may bring, in bytes.
inline constexpr uint64_t kMostClientState = uint64_t{1} << 20;
// What the ranks' client_state may take: for each rank that of the open step, that of the last one, and one in each
// snapshot.
inline uint64_t ClientStateBytes(uint64_t ranks, uint64_t snapshots) {
  return ranks * (2 + snapshots) * kMostClientState;
}

// What a chunk of a version takes beside its weights (server/follow): its place, its owners' count, and the allocator's.
inline constexpr uint64_t kPieceOverhead = 256;
// What a reader of a version on the disk keeps of its file: a MiB of codes and one of scales (server/follow/version_file.h).
inline constexpr uint64_t kStoredReadBytes = uint64_t{2} << 20;
// Where readers may follow the run: a version of all weights as they are served.
uint64_t VersionBytes(const RunSpec& spec, const Plan& plan);
// A message to a reader: a chunk, or many small ones with what it says of each. And the digests of the weights that a
// reader came with.
uint64_t VersionMessageBytes(const Plan& plan);
inline uint64_t ReaderDigestBytes(const Plan& plan) { return Product(plan.tensors, sizeof(uint64_t)); }
// The most that one may have changed of the one before: half of its bytes, or it goes whole.
uint64_t VersionChangeBytes(const RunSpec& spec, const Plan& plan);
// What versions, and what they have changed, may take together: the newest version, the one that is made, what that may
// have changed, which is half of it at most, and one that a slow reader is in the middle of.
inline uint64_t FollowMemoryBytes(const RunSpec& spec, const Plan& plan) {
  return Sum(Product(3, VersionBytes(spec, plan)), VersionChangeBytes(spec, plan));
}

// What versions that have names take beside that: on a disk the one that is being written there; in memory all.
uint64_t TagMemoryBytes(const RunSpec& spec, const Plan& plan);

// What readers may follow as it is served: the weights, and each average of them where the spec says so.
inline size_t ServedSeriesCount(const RunSpec& spec) {
  return 1 + (spec.follow && spec.follow->averages ? spec.averages.size() : 0);
}
// What readers are sent of a run, and no more of its plan: parameters, tensors, and what weights take. Of the run itself,
// or as it is followed in a format (ServedIn).
Plan PlanOfServing(const RunSpec& spec);

// What is kept of a tensor's gradient from one curvature probe to the next: a multiple of kAlignment.
inline uint64_t KeptBytes(const RunSpec& spec, const TensorSpec& t) {
  return ProbesCurvature(spec, t) ? kernels::SampledElements(t.elements) * sizeof(float) : 0;
}

// What an update of the tensor as a matrix works on, beside its planes: the direction, and then the room.
uint64_t MatrixBytes(const RunSpec& spec, const TensorSpec& t);

Plan MakePlan(const RunSpec& spec, Placement placement);
// On one device.
inline Plan MakePlan(const RunSpec& spec) { return MakePlan(spec, OnOneDevice(spec)); }

}  // namespace ballast
