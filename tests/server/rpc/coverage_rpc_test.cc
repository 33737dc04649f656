// Ranks that hold parts of the model: each sends its own gradients and receives its own weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "server/convert/convert.h"
#include "server/plan/plan.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class CoverageRpcTest : public RpcTest {
 protected:
  struct Range {
    uint32_t tensor;
    uint64_t begin, end;
  };
  void SetUp() override {
    StartServer();
    wire_spec_.set_ranks(2);
    wire_spec_.set_reduction(v1::REDUCTION_SUM);
    const auto created = CreateRun(wire_spec_);
    ASSERT_TRUE(created.ok());
    EXPECT_EQ(created->plan().chunk_elements(), 4096u);
    spec_ = ToRunSpec(wire_spec_, config_.limits).value();
  }
  // The rank has these ranges, both ways, and no others of their tensors.
  static v1::AttachRequest Request(uint32_t rank, const std::vector<Range>& ranges) {
    v1::AttachRequest request;
    request.set_run_id("r1");
    request.set_rank(rank);
    request.set_world(2);
    std::map<uint32_t, v1::TensorCoverage*> of;
    for (const Range& range : ranges) {
      if (of.count(range.tensor) == 0) {
        of[range.tensor] = request.add_coverage();
        of[range.tensor]->set_tensor(range.tensor);
      }
      if (range.begin == range.end) continue;
      for (auto* added : {of[range.tensor]->add_contributes(), of[range.tensor]->add_receives()}) {
        added->set_begin(range.begin);
        added->set_end(range.end);
      }
    }
    return request;
  }
  std::string Refusal(const std::vector<Range>& ranges) {
    v1::AttachResponse response;
    return Attach(Request(0, ranges), &response).error_message();
  }

  v1::RunSpec wire_spec_ = SmallSpec();
  RunSpec spec_;
};

TEST_F(CoverageRpcTest, EachRankSendsAndReceivesItsPartAndTheBitsAreThoseOfTheWhole) {
  // Tensor 0 has 30,000 elements: 8 chunks. Rank 0 has the first three, and tensor 1; rank 1 the rest, and tensor 2.
  const std::vector<std::vector<Range>> parts = {{{0, 0, 12288}, {2, 0, 0}}, {{0, 12288, 30000}, {1, 0, 0}}};
  std::vector<std::string> tokens;
  for (const uint32_t rank : {0, 1}) {
    v1::AttachResponse response;
    const grpc::Status s = Attach(Request(rank, parts[rank]), &response);
    ASSERT_TRUE(s.ok()) << s.error_message();
    tokens.push_back(response.session_token());
  }
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(spec_, tokens[0], &loaded).ok());
  Reference reference(spec_);
  for (uint32_t i = 0; i < 3; ++i) reference.Load(i, Weights(spec_, i));
  std::vector<std::unique_ptr<Wire>> wires;
  for (const std::string& token : tokens) {
    wires.push_back(std::make_unique<Wire>(trainer_.get()));
    ASSERT_TRUE(wires.back()->Open(token));
    wires.back()->Begin(1);
  }
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string gradient = Gradient(spec_, i, 1);
    reference.Update(i, 1, gradient);
    for (const v1::Gradient& chunk : Chunks(spec_, i, gradient)) {
      const bool first = i == 1 || (i == 0 && chunk.chunk() < 3);
      wires[first ? 0 : 1]->Chunk(chunk);
    }
  }
  for (const auto& wire : wires) wire->EndStep();
  const StepAnswer zero = ReadStep(wires[0].get()), one = ReadStep(wires[1].get());
  ASSERT_TRUE(zero.result && one.result);
  EXPECT_EQ(zero.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_THAT(zero.weights, SizeIs(2));
  EXPECT_THAT(one.weights, SizeIs(2));
  EXPECT_EQ(zero.weights.at(0) + one.weights.at(0), reference.EncodeWeights(0));
  EXPECT_EQ(zero.weights.at(1), reference.EncodeWeights(1));
  EXPECT_EQ(one.weights.at(2), reference.EncodeWeights(2));
}

// Each rank has a half of every tensor, cut in the middle of a chunk, and the pool has room for two of them.
TEST_F(CoverageRpcTest, PartsOfManyTensorsPassThroughAPoolOfTwo) {
  constexpr uint64_t kElements = 30000, kCut = 13000;
  constexpr uint32_t kTensors = 10;
  server_.reset();
  Config config = DefaultConfig();
  config.limits.credit_bytes = 1;
  StartServer(config);
  wire_spec_.clear_tensors();
  for (uint32_t i = 0; i < kTensors; ++i) {
    v1::TensorSpec* tensor = wire_spec_.add_tensors();
    tensor->set_name(absl::StrCat("w", i));
    tensor->add_shape(kElements);
    tensor->set_dtype("bf16");
  }
  ASSERT_TRUE(CreateRun(wire_spec_).ok());
  spec_ = ToRunSpec(wire_spec_, config_.limits).value();
  ASSERT_EQ(MakePlan(spec_).shards[0].pool_bytes, 2 * SlabBytes(spec_, spec_.tensors[0]));
  std::vector<Range> halves[2];
  for (uint32_t i = 0; i < kTensors; ++i) {
    halves[0].push_back({i, 0, kCut});
    halves[1].push_back({i, kCut, kElements});
  }
  std::unique_ptr<Wire> wires[2];
  Reference reference(spec_);
  for (const uint32_t rank : {0, 1}) {
    v1::AttachResponse response;
    ASSERT_TRUE(Attach(Request(rank, halves[rank]), &response).ok());
    wires[rank] = std::make_unique<Wire>(trainer_.get());
    ASSERT_TRUE(wires[rank]->Open(response.session_token()));
    v1::LoadStateResponse loaded;
    ASSERT_TRUE(rank == 1 || LoadAll(spec_, response.session_token(), &loaded).ok());
  }
  for (uint32_t i = 0; i < kTensors; ++i) reference.Load(i, Weights(spec_, i));
  for (const auto& wire : wires) wire->Begin(1);
  for (uint32_t i = 0; i < kTensors; ++i) {
    const std::string gradient = Gradient(spec_, i, 1);
    reference.Update(i, 1, gradient);
    for (v1::Gradient chunk : Chunks(spec_, i, gradient)) {
      const uint64_t begin = chunk.chunk() * 4096, end = begin + chunk.data().size() / 2;
      const std::string whole = chunk.data();
      for (const Range& half : {halves[0][i], halves[1][i]}) {
        const uint64_t from = std::max(begin, half.begin), to = std::min(end, half.end);
        if (from >= to) continue;
        chunk.set_data(whole.substr(2 * (from - begin), 2 * (to - from)));
        chunk.set_crc32c(Crc32c(Bytes(chunk.data())));
        wires[half.begin == 0 ? 0 : 1]->Chunk(chunk);
      }
    }
  }
  for (const auto& wire : wires) wire->EndStep();
  const StepAnswer zero = ReadStep(wires[0].get()), one = ReadStep(wires[1].get());
  ASSERT_TRUE(zero.result && one.result);
  EXPECT_EQ(zero.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  for (uint32_t i = 0; i < kTensors; ++i) {
    EXPECT_EQ(zero.weights.at(i) + one.weights.at(i), reference.EncodeWeights(i)) << i;
  }
}

TEST_F(CoverageRpcTest, AGapIsNamedToTheLastRank) {
  v1::AttachResponse response;
  ASSERT_TRUE(Attach(Request(0, {{0, 0, 8192}}), &response).ok());
  const grpc::Status s = Attach(Request(1, {{0, 12288, 30000}}), &response);
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("no rank contributes to chunk 2 of tensor 0 'embed.weight'"));
}

TEST_F(CoverageRpcTest, AGapInAChunkIsNamedByItsElements) {
  v1::AttachResponse response;
  ASSERT_TRUE(Attach(Request(0, {{0, 0, 8191}}), &response).ok());
  EXPECT_TRUE(response.takes_partial_chunks());
  const grpc::Status s = Attach(Request(1, {{0, 8192, 30000}}), &response);
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("no rank contributes to elements [8191, 8192) of tensor 0 'embed.weight'"));
}

// The parts of one tensor, in the middle of a chunk; the payload is of the part, no more and no less.
TEST_F(CoverageRpcTest, AGradientHasTheElementsThatItsRankContributesTo) {
  const std::vector<Range> mine = {{0, 0, 5000}, {1, 0, 0}, {2, 0, 0}}, others = {{0, 5000, 30000}};
  v1::AttachResponse response;
  ASSERT_TRUE(Attach(Request(0, mine), &response).ok());
  const std::string token = response.session_token();
  ASSERT_TRUE(Attach(Request(1, others), &response).ok());
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(spec_, token, &loaded).ok());
  const std::string gradient = Gradient(spec_, 0, 1);
  const uint64_t element = WireBytes(spec_.tensors[0].gradient_format);
  for (const uint64_t elements : {uint64_t{4096}, uint64_t{903}}) {
    Wire wire(trainer_.get());
    ASSERT_TRUE(wire.Open(token));
    wire.Begin(1);
    v1::Gradient chunk = Chunks(spec_, 0, gradient)[1];
    chunk.mutable_data()->resize(elements * element);
    chunk.set_crc32c(Crc32c(Bytes(chunk.data())));
    wire.Chunk(chunk);
    const grpc::Status s = wire.Finish();
    EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(s.error_message(), HasSubstr("(904 elements of "));
    EXPECT_THAT(s.error_message(), HasSubstr(", [4096, 5000) of the tensor, to which the rank contributes)"));
  }
}

// A rank that receives a tensor and sends nothing of it may still be reading its weights when the others are done.
TEST_F(CoverageRpcTest, WeightsOfWhatARankDoesNotContributeToComeWhenItHasEndedItsStep) {
  v1::AttachRequest replica = Request(1, {{1, 0, 0}, {2, 0, 0}});
  for (v1::TensorCoverage& covered : *replica.mutable_coverage()) {
    covered.add_receives()->set_end(spec_.tensors[covered.tensor()].elements);
  }
  v1::AttachResponse response;
  ASSERT_TRUE(Attach(Request(0, {}), &response).ok());
  Wire one(trainer_.get()), two(trainer_.get());
  ASSERT_TRUE(one.Open(response.session_token()));
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(spec_, response.session_token(), &loaded).ok());
  ASSERT_TRUE(Attach(replica, &response).ok());
  ASSERT_TRUE(two.Open(response.session_token()));
  for (Wire* wire : {&one, &two}) {
    wire->Begin(1);
    wire->BeginMicro(0, /*last=*/true);
  }
  for (const uint32_t i : {1u, 2u, 0u}) {
    for (const v1::Gradient& chunk : Chunks(spec_, i, Gradient(spec_, i, 1))) {
      one.Chunk(chunk);
      if (i == 0) two.Chunk(chunk);
    }
  }
  one.EndStep();
  // Tensor 0, of which both send, is updated behind the others.
  std::set<uint32_t> seen;
  while (seen.count(0) == 0) {
    const auto answer = two.Read();
    ASSERT_TRUE(answer);
    if (answer->has_weights()) seen.insert(answer->weights().tensor());
  }
  EXPECT_THAT(seen, ElementsAre(0u));
  two.EndStep();
  const StepAnswer answer = ReadStep(&two);
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_EQ(answer.weights.count(1), 1u);
  EXPECT_EQ(answer.weights.count(2), 1u);
}

TEST_F(CoverageRpcTest, APullSendsThePartsThatItNames) {
  const std::string token = AttachFresh("r1", false, 0, 2).session_token();
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(spec_, token, &loaded).ok());
  const auto pull = [&](const v1::PullRequest& request, grpc::Status* status) {
    std::map<std::pair<uint32_t, std::string>, std::string> got;
    std::vector<std::pair<uint64_t, bool>> chunks;
    grpc::ClientContext context;
    const auto reader = trainer_->Pull(&context, request);
    v1::Weights weights;
    while (reader->Read(&weights)) {
      got[{weights.tensor(), weights.slot()}] += weights.data();
      if (weights.tensor() == 0) chunks.emplace_back(weights.chunk(), weights.last());
    }
    *status = reader->Finish();
    return std::make_pair(got, chunks);
  };
  grpc::Status status;
  v1::PullRequest whole, part;
  whole.set_run_id("r1");
  part = whole;
  v1::TensorCoverage* of = part.add_parts();
  of->add_receives()->set_begin(5000);
  of->mutable_receives(0)->set_end(9000);
  part.add_parts()->set_tensor(2);  // nothing
  const auto all = pull(whole, &status).first;
  const auto [got, chunks] = pull(part, &status);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const uint64_t bytes = WireBytes(spec_.tensors[0].serving_format);
  EXPECT_EQ(got.size(), 2u);
  EXPECT_EQ(got.at({0, ""}), all.at({0, ""}).substr(5000 * bytes, 4000 * bytes));
  EXPECT_EQ(got.at({1, ""}), all.at({1, ""}));
  EXPECT_THAT(chunks, ElementsAre(std::pair(1, false), std::pair(2, true)));

  for (const char* slot : {"master", "momentum", "updates"}) part.add_slots(slot), whole.add_slots(slot);
  const auto states = pull(whole, &status).first;
  const auto parts = pull(part, &status).first;
  EXPECT_EQ(parts.size(), 6u);
  for (const char* slot : {"master", "momentum"}) {
    EXPECT_EQ(parts.at({0, slot}), states.at({0, slot}).substr(5000 * 4, 4000 * 4)) << slot;
  }

  part.clear_slots();
  part.add_digests(1);
  EXPECT_EQ((pull(part, &status), status.error_code()), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("parts and digests"));
  part.clear_digests();
  part.mutable_parts(0)->mutable_receives(0)->set_end(30001);
  EXPECT_EQ((pull(part, &status), status.error_code()), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("PullRequest.parts of tensor 'embed.weight', receives [5000, 30001)"));
}

TEST_F(CoverageRpcTest, WrongRangesAreRefusedByName) {
  EXPECT_THAT(Refusal({{9, 0, 1}}), HasSubstr("coverage names tensor 9, but the run has 3 tensors"));
  EXPECT_THAT(Refusal({{0, 0, 30001}}), HasSubstr("'embed.weight', contributes [0, 30001): the tensor has 30000"));
  EXPECT_THAT(Refusal({{0, 100, 200}, {0, 300, 400}}),
              HasSubstr("contributes [300, 400): chunk 0, elements [0, 4096), has a piece of the range ahead of it"));
  EXPECT_THAT(Refusal({{0, 100, 200}, {0, 4100, 4200}, {0, 9000, 30000}}),
              HasSubstr("contributes [9000, 30000): chunk 2 would be the third of the tensor that is not whole"));
  EXPECT_THAT(Refusal({{0, 8192, 4096}}), HasSubstr("it is empty"));
  EXPECT_THAT(Refusal({{0, 4096, 8192}, {0, 0, 4096}}), HasSubstr("before the range ahead of it ends"));
  v1::AttachRequest twice = Request(0, {{0, 0, 4096}});
  *twice.add_coverage() = twice.coverage(0);
  v1::AttachResponse response;
  EXPECT_THAT(Attach(twice, &response).error_message(), HasSubstr("coverage has tensor 'embed.weight' twice"));
}

}  // namespace
}  // namespace ballast::testing
