#include "server/plan/plan.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include "absl/strings/str_cat.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/plan/accounts.h"
#include "server/step/reduction_tracker.h"
#include "server/store/parameter_store.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using testing::Made;
using testing::MakeSpec;
using testing::SmallSpec;
using testing::UncountableSpec;

TEST(PlanTest, CountsTheDefaultsOfAnAlignedTensorByHand) {
  constexpr uint64_t kN = 1 << 20;
  const Plan plan = MakePlan(Made(MakeSpec("r1", {{"w", {1 << 20}}})));
  EXPECT_EQ(plan.parameters, kN);
  EXPECT_EQ(plan.bytes.weights, 3 * kN);
  EXPECT_EQ(plan.bytes.momentum, kN + kN / 32 * 2);
  EXPECT_EQ(plan.bytes.variance, kN + kN / 32 * 2);
  EXPECT_EQ(plan.bytes.padding, 0u);
  EXPECT_EQ(plan.shards[0].pool_bytes, 2 * kN);  // all of them: less than twice the largest
  EXPECT_EQ(plan.window_bytes, 2 * kN);          // likewise
  EXPECT_EQ(plan.bytes.gradients, 4 * kN);
  EXPECT_EQ(plan.push_bytes, 2 * kN);
  EXPECT_EQ(plan.pull_bytes, 2 * kN);
}

TEST(PlanTest, PaddingOfATinyTensorIsCounted) {
  const Plan plan = MakePlan(Made(MakeSpec("r1", {{"b", {1}}})));
  EXPECT_EQ(plan.bytes.weights, 256u * 2 + 256);
  EXPECT_EQ(plan.bytes.momentum, 256u + 64);  // codes; 8 scales of 2 bytes take an aligned 64
  EXPECT_EQ(plan.bytes.padding, plan.bytes.weights - 3 + 2 * (256 + 64 - 3));
}

TEST(PlanTest, ThePoolHoldsTwiceTheLargestOrTheCredit) {
  RunSpec spec = Made(MakeSpec("r1", {{"a", {1000000}}, {"b", {1000000}}, {"c", {1000000}}, {"d", {64}}}));
  spec.credit_bytes = 64;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 2 * AlignUp(2000000));
  spec.credit_bytes = 5000000;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, AlignUp(5000000));
  spec.credit_bytes = 1 << 30;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 3 * AlignUp(2000000) + 128);
}

TEST(PlanTest, SumsTakeFp32AndSeveralMicroBatchesKeepThemAll) {
  RunSpec spec = Made(MakeSpec("r1", {{"a", {1000000}}, {"b", {1000000}}, {"c", {1000000}}}));
  spec.credit_bytes = 64;
  spec.ranks = 4;
  Plan plan = MakePlan(spec);
  EXPECT_EQ(plan.shards[0].pool_bytes, 2 * AlignUp(4000000));
  // A chunk that may go alone, and two beyond credit, of 1 MiB.
  EXPECT_EQ(plan.window_bytes, 3u << 20);
  EXPECT_EQ(plan.bytes.gradients, plan.shards[0].pool_bytes + 4 * plan.window_bytes);
  spec.ranks = 1;
  spec.accumulation = 2;
  plan = MakePlan(spec);
  EXPECT_EQ(plan.shards[0].pool_bytes, 3 * AlignUp(4000000));
}

// Two bytes a parameter for one contribution in bf16, four where several are summed.
TEST(PlanTest, StagedKeepsEveryGradientUntilTheVerdict) {
  v1::RunSpec wire = MakeSpec("r1", {{"a", {1000000}}, {"b", {1000000}}, {"c", {1000000}}});
  wire.set_commit(v1::COMMIT_MODE_STAGED);
  RunSpec spec = Made(wire);
  spec.credit_bytes = 64;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 3 * AlignUp(2000000));
  spec.ranks = 2;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 3 * AlignUp(4000000));
  spec.ranks = 1;
  spec.accumulation = 2;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 3 * AlignUp(4000000));
}

TEST(PlanTest, ScalesOfTheServingFormatAreCounted) {
  v1::RunSpec wire = MakeSpec("r1", {{"w", {1000, 300}, "fp32"}, {"b", {64}, "fp32"}});
  const uint64_t without = [&] {
    wire.mutable_groups(0)->set_serving("fp8-e4m3");
    return MakePlan(Made(wire)).bytes.staging;
  }();
  wire.mutable_groups(0)->set_serving("int8-row");
  RunSpec spec = Made(wire);
  const Plan plan = MakePlan(spec);
  EXPECT_EQ(plan.shards[0].scales, 1001u);
  EXPECT_EQ(plan.trainer_weight_bytes, 4u * 300064);
  // Chunks of 262144 elements: rows 0..873, of which the last is cut, and 873..999.
  EXPECT_EQ(plan.send_buffer_scales, 874u);
  EXPECT_EQ(plan.pull_bytes, 300064u + 4 * (874 + 127 + 1));
  EXPECT_EQ(plan.small_buffer_bytes, 64u);
  EXPECT_EQ(plan.small_buffer_scales, 1u);
  const uint64_t small =
      (1 + 1 + ReaderBufferCount(spec)) * kSmallSendBuffers;  // the rank's, for digests, the readers'
  EXPECT_EQ(plan.bytes.staging,
            without + (SendBufferCount(spec) + ReaderBufferCount(spec)) * 874 * 4 + small * 4 + AlignUp(1001 * 4));
  wire.mutable_groups(0)->set_gradient("fp8-e5m2");
  EXPECT_EQ(MakePlan(Made(wire)).push_bytes, 300064u);
}

// All small shapes of rows against chunks, by the loop over chunks that the plan must not need.
TEST(PlanTest, ScalesOfChunksAreThoseOfALoopOverThem) {
  RunSpec spec;
  uint64_t compared = 0;
  for (spec.chunk_elements = 1; spec.chunk_elements <= 12; ++spec.chunk_elements) {
    for (uint64_t row = 1; row <= 30; ++row) {
      for (uint64_t rows = 1; rows <= 15; ++rows) {
        const TensorSpec t{.name = "w", .elements = row * rows, .row_length = row};
        uint64_t most = 0, all = 0;
        for (uint64_t k = 0; k < ChunkCount(spec, t); ++k) {
          const uint64_t scales = ScalesOf(t, ChunkBegin(spec, k), ChunkEnd(spec, t, k)).size();
          most = std::max(most, scales);
          all += scales;
        }
        const ChunkScales found = ScalesOfChunks(spec, t);
        ASSERT_EQ(found.most, most) << "chunks of " << spec.chunk_elements << ", " << rows << " rows of " << row;
        ASSERT_EQ(found.all, all) << "chunks of " << spec.chunk_elements << ", " << rows << " rows of " << row;
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 12u * 30 * 15);
  EXPECT_EQ(ScalesOfChunks(spec, {.name = "w", .elements = 5}).all, 0u);
}

// A loop over their chunks would take hours.
TEST(PlanTest, TheLargestTensorsArePlannedAtOnce) {
  v1::RunSpec wire = MakeSpec("r1", {});
  wire.mutable_groups(0)->set_serving("int8-row");
  for (int i = 0; i < 20000; ++i) {
    v1::TensorSpec* t = wire.add_tensors();
    t->set_name(absl::StrCat("w", i));
    t->mutable_shape()->Add(int64_t{1} << 38);
    t->mutable_shape()->Add(4);
    t->set_dtype("bf16");
  }
  const Plan plan = MakePlan(Made(wire));
  EXPECT_EQ(plan.parameters, 20000 * (uint64_t{1} << 40));
  EXPECT_EQ(plan.pull_bytes, 20000 * ((uint64_t{1} << 40) + 4 * (uint64_t{1} << 38)));
  EXPECT_EQ(plan.send_buffer_scales, (1u << 18) / 4);
}

TEST(PlanTest, TheKindsMakeUpTheTotal) {
  PlanBytes bytes;
  uint64_t next = 1, on_device = 0, beside = 0;
  for (const ByteKind& kind : kByteKinds) {
    bytes.*kind.bytes = next;
    (kind.on_device ? on_device : beside) += next;
    next *= 10;
  }
  EXPECT_EQ(bytes.on_device(), on_device);
  EXPECT_EQ(bytes.beside_device(), beside);
  EXPECT_EQ(bytes.total(), 111111111u);
}

TEST(PlanTest, VersionsForReadersTakeMemoryWhereTheRunMayBeFollowed) {
  v1::RunSpec wire = testing::SmallSpec();
  wire.mutable_groups(0)->set_serving("bf16");
  EXPECT_EQ(MakePlan(Made(wire)).bytes.following, 0u);
  wire.mutable_follow()->set_readers(5);
  const RunSpec spec = Made(wire);
  const Plan plan = MakePlan(spec);
  const uint64_t version = 2 * plan.parameters + ChunkStarts(spec).back() * kPieceOverhead;
  EXPECT_EQ(VersionBytes(spec, plan), version);
  EXPECT_EQ(FollowMemoryBytes(spec, plan), 3 * version + plan.parameters + ChunkStarts(spec).back() * kPieceOverhead);
  const uint64_t reader = VersionMessageBytes(plan) + ReaderDigestBytes(plan);
  EXPECT_EQ(ReaderDigestBytes(plan), 8 * spec.tensors.size());
  EXPECT_EQ(plan.bytes.following, FollowMemoryBytes(spec, plan) + 5 * reader);
  EXPECT_EQ(plan.bytes.on_device(), plan.bytes.total() - plan.bytes.beside_device());
  for (const double decay : {0.9, 0.999}) wire.add_averages(decay);
  EXPECT_EQ(MakePlan(Made(wire)).bytes.following, plan.bytes.following)
      << "averages are not followed unless it says so";
  wire.mutable_follow()->set_averages(true);
  EXPECT_EQ(MakePlan(Made(wire)).bytes.following, 3 * FollowMemoryBytes(spec, plan) + 5 * reader);
}

TEST(PlanTest, EachFormatThatIsFollowedTakesWhatARunTakesThatServesIt) {
  v1::RunSpec wire = testing::SmallSpec();
  wire.mutable_follow()->set_readers(5);
  uint64_t versions = 0, message = 0, scales = 0;
  const uint64_t alone = MakePlan(Made(wire)).shards[0].scales;
  for (const char* format : {"", "bf16", "int8-row", "fp8-e4m3"}) {
    v1::RunSpec served = wire;
    served.mutable_groups(0)->set_serving(format);
    const RunSpec spec = Made(served);
    const Plan plan = MakePlan(spec);
    versions += FollowMemoryBytes(spec, plan);
    message = std::max(message, VersionMessageBytes(plan));
    scales = std::max(scales, plan.shards[0].scales);
  }
  for (const char* format : {"bf16", "int8-row", "fp8-e4m3"}) wire.mutable_follow()->add_formats(format);
  const Plan plan = MakePlan(Made(wire));
  EXPECT_EQ(plan.bytes.following, versions + 5 * (message + ReaderDigestBytes(plan)));
  EXPECT_GT(scales, alone);
  EXPECT_EQ(plan.shards[0].scales, scales) << "int8 has a scale for each row, on the device";
}

// In 64 bits alone the sum would be some TB.
TEST(PlanTest, ARunTooLargeToCountFitsNowhere) {
  const RunSpec spec = Made(UncountableSpec());
  const Plan plan = MakePlan(spec);
  EXPECT_EQ(plan.bytes.stored(), spec.tensors.size() * (uint64_t{12} << 40));
  EXPECT_LT(17 * plan.bytes.stored(), uint64_t{1} << 50) << "it wraps";
  EXPECT_EQ(plan.bytes.snapshots, 16 * plan.bytes.stored());
  EXPECT_EQ(plan.bytes.total(), kUncountable);
  EXPECT_FALSE(ChoosePlacement(spec, {kUncountable}));
  PlanBytes twice = plan.bytes;
  twice += plan.bytes;
  EXPECT_EQ(twice.snapshots, kUncountable);
  EXPECT_EQ(twice.stored(), 2 * plan.bytes.stored());
}

// One tile of 16 in fp32, and at least a row of a tensor, where the rule has a second moment.
TEST(PlanTest, GradientsThatCurvatureProbesKeepAreStaging) {
  const RunSpec spec = Made(MakeSpec("r1", {{"w", {1 << 20}}, {"b", {5}}}));
  RunSpec probed = spec;
  probed.spikes.curvature = true;
  EXPECT_EQ(MakePlan(spec).shards[0].kept_bytes, 0u);
  EXPECT_EQ(MakePlan(probed).shards[0].kept_bytes, (1u << 20) / 16 * 4 + 256 * 4);
  EXPECT_EQ(MakePlan(probed).bytes.staging, MakePlan(spec).bytes.staging + (1u << 20) / 16 * 4 + 256 * 4);
  v1::RunSpec wire = MakeSpec("r1", {{"w", {1 << 20}}});
  wire.mutable_groups(0)->set_rule("sgd");
  probed = Made(wire);
  probed.spikes.curvature = true;
  EXPECT_EQ(MakePlan(probed).shards[0].kept_bytes, 0u);
}

TEST(PlanTest, SnapshotsAreAsLargeAsWeightsAndState) {
  v1::RunSpec wire = MakeSpec("r1", {{"w", {1 << 20}}});
  const PlanBytes without = MakePlan(Made(wire)).bytes;
  EXPECT_EQ(without.snapshots, 0u);
  wire.mutable_rewind()->set_snapshots(3);
  const PlanBytes with = MakePlan(Made(wire)).bytes;
  EXPECT_EQ(with.snapshots, 3 * uint64_t{5 * (1 << 20) + 4 * (1 << 15)});  // 5.125 bytes a parameter
  EXPECT_EQ(with.total(), without.total() + with.snapshots + 3 * kMostClientState);
}

// Each rank has one for the open step, one for the last step, and one in each snapshot.
TEST(PlanTest, ClientStateIsCountedAtItsMost) {
  v1::RunSpec wire = MakeSpec("r1", {{"w", {64}}});
  EXPECT_EQ(MakePlan(Made(wire)).bytes.client_state, 2u << 20);
  wire.set_ranks(3);
  wire.mutable_rewind()->set_snapshots(4);
  const PlanBytes bytes = MakePlan(Made(wire)).bytes;
  EXPECT_EQ(bytes.client_state, 18u << 20);
  EXPECT_EQ(bytes.total(), bytes.on_device() + bytes.snapshots + bytes.client_state);
}

// Chunks of a rank that wait: its window's worth, the smallest first, of so many micro-batches as are kept account of.
TEST(PlanTest, TheAccountsOfWhatCameAreCounted) {
  RunSpec spec =
      Made(MakeSpec("r1", {{"w", {1 << 20}, "fp32"}, {"b", {5}, "fp32"}}));  // 4 chunks of 1 MiB, 1 of 20 bytes
  EXPECT_EQ(MostHeldChunks(spec, 0), 0u);
  EXPECT_EQ(MostHeldChunks(spec, 3 << 20), 1u + 2);
  EXPECT_EQ(MostHeldChunks(spec, 100 << 20), 5u);
  spec.accumulation = 1000;
  EXPECT_EQ(MostHeldChunks(spec, 3 << 20), 2u + 2);
  EXPECT_EQ(MostHeldChunks(spec, 100 << 20), 10u);
  const uint64_t one = MakePlan(spec).account_bytes;
  spec.accumulation = 2;
  EXPECT_EQ(MakePlan(spec).account_bytes, one);
  spec.ranks = 64;
  EXPECT_GT(MakePlan(spec).account_bytes, 10 * one);
}

// A chunk may come in part, but no more than two of a tensor: so what waits is more chunks, and they are counted.
TEST(PlanTest, ChunksThatRanksHaveInPartAreCounted) {
  RunSpec spec =
      Made(MakeSpec("r1", {{"w", {1 << 20}, "fp32"}, {"b", {5}, "fp32"}, {"s", {1}, "fp32"}}));  // chunks of 1 MiB
  EXPECT_EQ(MostParts(spec), 2u + 1);
  EXPECT_EQ(MostHeldChunks(spec, 1 << 20), 2u);
  spec.ranks = 2;
  EXPECT_EQ(MostHeldChunks(spec, 1 << 20), 2u + 1 + 1);
  EXPECT_EQ(MostHeldChunks(spec, 3 << 20), 6u);
  EXPECT_EQ(CoverageBytes(spec), ChunkSet::Bytes(6) + 3 * sizeof(ChunkSet::Piece));
}

// 100,000 tensors of one element, 64 ranks, 1,024 micro-batches: what one client may ask for.
TEST(PlanTest, TheAccountsOfTheLargestRunAreBounded) {
  RunSpec spec = Made(MakeSpec("r1", {{"w", {1}, "fp32"}}));
  spec.tensors.resize(100000, spec.tensors[0]);
  spec.ranks = 64;
  spec.accumulation = 1024;
  const Plan plan = MakePlan(spec);
  EXPECT_GT(plan.account_bytes,
            ReductionTracker::BytesAtMost({.ranks = 64, .micros = 1024, .tensors = 100000, .chunks = 100000}));
  EXPECT_LT(plan.account_bytes, uint64_t{3} << 30);
  EXPECT_GT(plan.bytes.staging, plan.account_bytes);
}

// A reader's chunk may be of state in fp32, which is decoded from beside it; and a copy of the largest tensor is kept
// for one.
TEST(PlanTest, ChunksThatReadersHoldAreStaging) {
  const RunSpec spec = Made(MakeSpec("r1", {{"w", {1 << 20}}, {"v", {1 << 19}}}));  // served in bf16
  const Plan plan = MakePlan(spec);
  EXPECT_EQ(plan.copy_bytes, (3u << 20) + 2 * ((1u << 20) + (1u << 16)));  // split24, companded8
  EXPECT_EQ(plan.state_room_bytes, (1u << 18) + (1u << 14));
  EXPECT_EQ(
      plan.reader_bytes,
      (1 + kMoreReaders) * (2 * (uint64_t{1} << 20) + plan.state_room_bytes + CoverageBytes(spec)) + plan.copy_bytes);
  EXPECT_GT(plan.bytes.staging, plan.reader_bytes + plan.account_bytes);
}

// What malloc gave out for ranks that name every tensor.
TEST(PlanTest, CoverageTakesNoMoreThanWasPlanned) {
  constexpr uint32_t kRanks = 16;
  constexpr uint64_t kTensors = 20000;
  RunSpec spec = Made(MakeSpec("r1", {{"w", {3}, "fp32"}}));
  spec.tensors.resize(kTensors, spec.tensors[0]);
  v1::AttachRequest request;
  for (uint32_t i = 0; i < kTensors; ++i) {
    v1::TensorCoverage* covered = request.add_coverage();
    covered->set_tensor(i);
    covered->add_contributes()->set_end(2);
    covered->add_receives()->set_end(1);
  }
  const auto allocated = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  std::vector<Coverage> ranks;
  ranks.reserve(kRanks);
  const auto starts = std::make_shared<const std::vector<uint64_t>>(ChunkStarts(spec));
  const auto made = ToCoverage(request, spec, starts);
  ASSERT_TRUE(made.ok()) << made.status();
  const size_t before = allocated();
  for (uint32_t r = 0; r < kRanks; ++r) ranks.push_back(*made);  // as it is kept
  const size_t taken = allocated() - before;
  const uint64_t planned = 2 * kRanks * CoverageBytes(spec);
  EXPECT_EQ(ranks[0].contributes.bytes(), CoverageBytes(spec));
  EXPECT_EQ(starts->size() * sizeof(uint64_t), ChunkSet::StartsBytes(kTensors));
  EXPECT_LE(taken, planned + 2 * kRanks * 4160 + 16384) << "beside what malloc adds to each, at most a page, and keeps";
}

TEST(PlanTest, TheStoreAllocatesExactlyThePlanForEveryKernel) {
  CpuDevice device({.threads = 1});
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    v1::RunSpec wire = SmallSpec();
    wire.mutable_groups(0)->set_rule(kernel.rule);
    wire.mutable_groups(0)->set_master(kernel.master);
    wire.mutable_groups(0)->set_state(kernel.state);
    wire.mutable_groups(0)->set_serving("int8-row");
    if (kernel.fit != nullptr) testing::KeepVectorsApart(&wire);
    RunSpec spec = Made(wire);
    spec.spikes.curvature = true;
    const Plan whole = MakePlan(spec);
    Strand strand({.name = "t"});
    const auto store = ParameterStore::Create({.spec = &spec, .plan = &whole, .devices = {&device}, .strand = &strand});
    ASSERT_TRUE(store.ok()) << store.status();
    const PlanBytes plan = whole.bytes, live = (*store)->bytes();
    EXPECT_EQ(live.weights, plan.weights);
    EXPECT_EQ(live.momentum, plan.momentum);
    EXPECT_EQ(live.variance, plan.variance);
    EXPECT_EQ(live.staging + SendBufferBytes(spec, whole) + whole.account_bytes + whole.reader_bytes, plan.staging);
    uint64_t largest_copy = 0;
    for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
      const auto copy = (*store)->NewImage(i);
      ASSERT_TRUE(copy.ok()) << copy.status();
      largest_copy = std::max(largest_copy, copy->bytes());
    }
    EXPECT_EQ(whole.copy_bytes, largest_copy);
    EXPECT_EQ(device.allocated_bytes(), plan.weights + plan.momentum + plan.variance + live.staging);
    strand.Stop();
  }
  EXPECT_EQ(device.allocated_bytes(), 0u);
}

}  // namespace
}  // namespace ballast
