#include "server/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "proto/batch.h"

#include "kernels/matrix/newton_schulz.h"
#include "server/plan/accounts.h"
#include "server/spec/stored_planes.h"

namespace ballast {
namespace {

// Bytes the plane would take without padding and alignment.
uint64_t NeededPlaneBytes(const kernels::Plane& plane, uint64_t elements) {
  return (elements + plane.per - 1) / plane.per * plane.bytes;
}

// The scales of the tensor's first `chunks` chunks: each row counts once, and once more for every boundary between two
// chunks that cuts it.
uint64_t ScalesOfFirstChunks(const RunSpec& spec, const TensorSpec& t, uint64_t chunks) {
  if (chunks == 0) return 0;
  const uint64_t rows = ScalesOf(t, 0, ChunkEnd(spec, t, chunks - 1)).size();
  const uint64_t chunks_of_whole_rows = t.row_length / std::gcd(spec.chunk_elements, t.row_length);
  return rows + (chunks - 1) - (chunks - 1) / chunks_of_whole_rows;
}

// Adds what it takes to send a tensor's weights: bytes and scales, of all chunks and of the largest.
void AddServing(const RunSpec& spec, const TensorSpec& t, Plan* plan) {
  Add(&plan->pull_bytes, ServingBytes(t));
  const uint64_t chunk_bytes = std::min(t.elements, spec.chunk_elements) * WireBytes(t.serving_format);
  plan->send_buffer_bytes = std::max(plan->send_buffer_bytes, AlignUp(chunk_bytes));
  const ChunkScales scales = ScalesOfChunks(spec, t);
  Add(&plan->pull_bytes, scales.all * sizeof(float));
  plan->send_buffer_scales = std::max(plan->send_buffer_scales, scales.most);
  if (!IsSentSmall(t)) return;
  plan->small_buffer_bytes = std::max(plan->small_buffer_bytes, AlignUp(chunk_bytes));
  plan->small_buffer_scales = std::max(plan->small_buffer_scales, ScaleCount(t));
}

// Adds what it takes to read a tensor, its state too: of a chunk, and of a copy of all.
void AddReading(const RunSpec& spec, const TensorSpec& t, Plan* plan) {
  const StoredPlanes planes(spec, t);
  const uint64_t elements = std::min(t.elements, spec.chunk_elements);
  plan->copy_bytes = std::max(plan->copy_bytes, StoredBytes(planes, planes.size(), t.elements));
  plan->reader_chunk_bytes = std::max(plan->reader_chunk_bytes, AlignUp(elements * sizeof(float)));
  if (IsReadSmall(t)) {
    plan->small_reader_bytes = std::max(plan->small_reader_bytes, AlignUp(elements * sizeof(float)));
    plan->small_reader_scales = std::max(plan->small_reader_scales, ScaleCount(t));
  }
  for (const auto kind : {kernels::PlaneKind::kMomentum, kernels::PlaneKind::kVariance}) {
    uint64_t bytes = 0;
    for (const kernels::Plane& plane : planes) {
      if (plane.kind == kind) bytes += AlignedPlaneBytes(plane, elements);
    }
    plan->state_room_bytes = std::max(plan->state_room_bytes, bytes);
    if (IsReadSmall(t)) plan->small_room_bytes = std::max(plan->small_room_bytes, bytes);
  }
}

uint64_t& OfKind(PlanBytes& bytes, kernels::PlaneKind kind) {
  uint64_t* const by_kind[] = {&bytes.weights, &bytes.momentum, &bytes.variance, &bytes.averages};
  return *by_kind[static_cast<size_t>(kind)];
}

// A shard while its tensors are added.
struct Shard {
  ShardPlan plan;
  uint64_t all_slabs = 0, largest_slab = 0, largest_tensor = 0;
  uint64_t last_slab = 0, last_but_one = 0;
  uint64_t largest_three = 0;  // slabs of tensors that follow one another
};

void AddSlab(uint64_t bytes, Shard* shard) {
  Add(&shard->all_slabs, bytes);
  shard->largest_slab = std::max(shard->largest_slab, bytes);
  const uint64_t three = Sum(Sum(shard->last_but_one, shard->last_slab), bytes);
  shard->largest_three = std::max(shard->largest_three, three);
  shard->last_but_one = std::exchange(shard->last_slab, bytes);
}

void AddTensor(const RunSpec& spec, const TensorSpec& t, Shard* shard) {
  PlanBytes& bytes = shard->plan.bytes;
  for (const kernels::Plane& plane : StoredPlanes(spec, t)) {
    const uint64_t aligned = AlignedPlaneBytes(plane, t.elements);
    Add(&OfKind(bytes, plane.kind), aligned);
    Add(&bytes.padding, aligned - NeededPlaneBytes(plane, t.elements));
  }
  Add(&shard->plan.scales, ScaleRoom(spec, t));
  Add(&shard->plan.kept_bytes, KeptBytes(spec, t));
  shard->plan.matrix_bytes = std::max(shard->plan.matrix_bytes, MatrixBytes(spec, t));
  AddSlab(SlabBytes(spec, t), shard);
  shard->largest_tensor = std::max(shard->largest_tensor, t.elements);
}

uint64_t PoolBytes(const RunSpec& spec, const Shard& shard) {
  // Several micro-batches keep every sum until the last of them; staged, every gradient until the verdict.
  if (spec.accumulation > 1 || spec.staged) return shard.all_slabs;
  // Any pool that has room for the largest slab will do (step/reduction_tracker.h); more lets one tensor's gradient come
  // while another's is read. Backward makes gradients in about the order of the tensors, so these two are neighbours:
  // the largest, an embedding often, need not have room twice.
  const uint64_t in_turn = std::min(Product(2, shard.largest_slab), shard.largest_three);
  return std::min(shard.all_slabs, std::max(in_turn, AlignUp(spec.credit_bytes)));
}

ShardPlan Completed(const RunSpec& spec, Shard shard) {
  ShardPlan& plan = shard.plan;
  plan.pool_bytes = PoolBytes(spec, shard);
  plan.bytes.gradients = plan.pool_bytes;
  plan.bytes.snapshots = Product(SnapshotImages(spec), plan.bytes.stored());
  plan.statistics_tiles = kernels::TilesOf(shard.largest_tensor);
  plan.bytes.staging = Sum(Sum(AlignUp(Product(plan.scales, sizeof(float))), plan.kept_bytes),
                           Sum(plan.matrix_bytes, AlignUp(plan.statistics_tiles * sizeof(kernels::TileStatistics))));
  return plan;
}

// The window is never larger than all gradients that are sent.
uint64_t WindowBytes(const RunSpec& spec, uint64_t push_bytes) {
  const uint64_t chunk_bytes = spec.chunk_elements * sizeof(float);
  return std::min(Product(spec.accumulation, push_bytes),
                  Sum(std::max(spec.credit_bytes, chunk_bytes), kChunksBeyondCredit * chunk_bytes));
}

// Adds what versions take that readers follow, and what is under way to them. Any of them may follow in any format.
void AddFollowing(const RunSpec& spec, Plan* plan) {
  plan->encoded_scales = plan->send_buffer_scales;
  if (!spec.follow) return;
  uint64_t message = VersionMessageBytes(*plan);
  uint64_t versions = Product(ServedSeriesCount(spec), FollowMemoryBytes(spec, *plan));
  for (const kernels::WireIndex format : FollowedFormats(spec)) {
    const RunSpec served = ServedIn(spec, format);
    const Plan serving = PlanOfServing(served);
    message = std::max(message, VersionMessageBytes(serving));
    Add(&versions, FollowMemoryBytes(served, serving));
    plan->encoded_scales = std::max(plan->encoded_scales, serving.send_buffer_scales);
  }
  // Who reads from the disk has a chunk, and the MiB that it is in.
  const bool reads_disk = spec.follow->tags > 0 && spec.checkpoints.has_value();
  const uint64_t of_disk = reads_disk ? Sum(message, kStoredReadBytes) : 0;
  const uint64_t readers = Product(spec.follow->readers, Sum(Sum(message, ReaderDigestBytes(*plan)), of_disk));
  plan->shards[0].bytes.following = Sum(Sum(versions, TagMemoryBytes(spec, *plan)), readers);
}

}  // namespace

Plan PlanOfServing(const RunSpec& spec) {
  Plan plan{.tensors = spec.tensors.size(), .chunk_elements = spec.chunk_elements};
  for (const TensorSpec& t : spec.tensors) {
    AddServing(spec, t, &plan);
    Add(&plan.parameters, t.elements);
  }
  plan.encoded_scales = plan.send_buffer_scales;
  return plan;
}

uint64_t MatrixBytes(const RunSpec& spec, const TensorSpec& t) {
  if (!IsOverMatrix(spec, t)) return 0;
  const uint64_t rows = MatrixRows(t), side = std::min(rows, t.elements / rows);
  const uint64_t room =
      Sum(Sum(t.elements, Product(2, Product(side, side))), kernels::kRoomToAlign);  // OrthogonalizingRoom
  const uint64_t bytes = Product(Sum(kernels::PaddedElements(t.elements), room), sizeof(float));
  return bytes == kUncountable ? bytes : AlignUp(bytes);
}

uint64_t VersionBytes(const RunSpec& spec, const Plan& plan) {
  return Sum(plan.pull_bytes, Product(ChunkStarts(spec).back(), kPieceOverhead));
}

uint64_t VersionChangeBytes(const RunSpec& spec, const Plan& plan) {
  return Sum(plan.pull_bytes / 2, Product(ChunkStarts(spec).back(), kPieceOverhead));
}

uint64_t VersionMessageBytes(const Plan& plan) {
  constexpr uint64_t kOfAPart = 128;
  const uint64_t chunk = plan.send_buffer_bytes + plan.send_buffer_scales * sizeof(float);
  return std::max<uint64_t>(chunk, kMostBatchBytes) + kMostBatchMessages * kOfAPart;
}

uint64_t TagMemoryBytes(const RunSpec& spec, const Plan& plan) {
  const uint64_t tags = spec.follow ? spec.follow->tags : 0;
  return Product(spec.checkpoints ? std::min<uint64_t>(tags, 1) : tags, VersionBytes(spec, plan));
}

uint64_t ScaleRoom(const RunSpec& spec, const TensorSpec& t) {
  uint64_t most = ScaleCount(t);
  for (const kernels::WireIndex format : FollowedFormats(spec)) {
    const uint64_t row_length = RowLength(t, format);
    if (row_length > 0) most = std::max(most, t.elements / row_length);
  }
  return most;
}

ChunkScales ScalesOfChunks(const RunSpec& spec, const TensorSpec& t) {
  if (t.row_length == 0) return {};
  const uint64_t chunks = ChunkCount(spec, t), full = t.elements / spec.chunk_elements;
  ChunkScales scales{.all = ScalesOfFirstChunks(spec, t, chunks)};
  if (full < chunks) scales.most = ScalesOf(t, ChunkBegin(spec, full), t.elements).size();
  if (full == 0) return scales;
  // A chunk that begins with a row has the fewest; others have at most one more.
  const uint64_t fewest = ScalesOf(t, 0, spec.chunk_elements).size();
  const bool more = ScalesOfFirstChunks(spec, t, full) > full * fewest;
  scales.most = std::max(scales.most, fewest + (more ? 1 : 0));
  return scales;
}

PlanBytes& PlanBytes::operator+=(const PlanBytes& other) {
  for (const ByteKind& kind : kByteKinds) Add(&(this->*kind.bytes), other.*kind.bytes);
  Add(&padding, other.padding);
  return *this;
}

PlanBytes& PlanBytes::operator-=(const PlanBytes& other) {
  for (const ByteKind& kind : kByteKinds) this->*kind.bytes -= other.*kind.bytes;
  padding -= other.padding;
  return *this;
}

Plan MakePlan(const RunSpec& spec, Placement placement) {
  Plan plan{.tensors = spec.tensors.size(), .chunk_elements = spec.chunk_elements, .placement = std::move(placement)};
  std::vector<Shard> shards(plan.placement.devices.size());
  for (const GroupSpec& group : spec.groups) plan.groups.push_back({.kernel = group.kernel});
  for (size_t i = 0; i < spec.tensors.size(); ++i) {
    const TensorSpec& t = spec.tensors[i];
    AddTensor(spec, t, &shards[plan.placement.shard_of[i]]);
    AddServing(spec, t, &plan);
    AddReading(spec, t, &plan);
    Add(&plan.groups[t.group].parameters, t.elements);
    Add(&plan.parameters, t.elements);
    Add(&plan.push_bytes, GradientBytes(t));
    if (HasJournal(spec)) Add(&plan.journal_bytes, t.elements * WireBytes(SlabFormat(spec, t)));
    Add(&plan.trainer_weight_bytes, t.elements * WireBytes(t.dtype));
  }
  for (Shard& shard : shards) plan.shards.push_back(Completed(spec, std::move(shard)));
  plan.window_bytes = WindowBytes(spec, plan.push_bytes);
  Add(&plan.shards[0].bytes.gradients, Product(spec.ranks, plan.window_bytes));
  Add(&plan.shards[0].bytes.staging, SendBufferBytes(spec, plan));
  plan.account_bytes = AccountBytes(spec, plan.window_bytes, plan.shards.size());
  Add(&plan.shards[0].bytes.staging, plan.account_bytes);
  const uint64_t reader_buffer_bytes = plan.reader_chunk_bytes + plan.send_buffer_scales * sizeof(float);
  const uint64_t small_bytes = plan.small_reader_bytes + plan.small_reader_scales * sizeof(float);
  const uint64_t rooms = plan.state_room_bytes + kSmallSendBuffers * plan.small_room_bytes;
  plan.reader_bytes = Sum(Product(ReaderBufferCount(spec), reader_buffer_bytes + kSmallSendBuffers * small_bytes),
                          Sum(Product(ReaderCount(spec), rooms + CoverageBytes(spec)), plan.copy_bytes));
  Add(&plan.shards[0].bytes.staging, plan.reader_bytes);
  if (HasJournal(spec)) Add(&plan.shards[0].bytes.staging, kJournalBuffers);
  plan.shards[0].bytes.client_state = ClientStateBytes(spec.ranks, SnapshotImages(spec));
  AddFollowing(spec, &plan);
  for (const ShardPlan& shard : plan.shards) plan.bytes += shard.bytes;
  return plan;
}

}  // namespace ballast
