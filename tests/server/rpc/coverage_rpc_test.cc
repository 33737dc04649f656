// Ranks that hold parts of the model: each sends its own gradients and receives its own weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "server/convert/convert.h"
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

TEST_F(CoverageRpcTest, AGapIsNamedToTheLastRank) {
  v1::AttachResponse response;
  ASSERT_TRUE(Attach(Request(0, {{0, 0, 8192}}), &response).ok());
  const grpc::Status s = Attach(Request(1, {{0, 12288, 30000}}), &response);
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("no rank contributes to chunk 2 of tensor 0 'embed.weight'"));
}

TEST_F(CoverageRpcTest, WrongRangesAreRefusedByName) {
  EXPECT_THAT(Refusal({{9, 0, 1}}), HasSubstr("coverage names tensor 9, but the run has 3 tensors"));
  EXPECT_THAT(Refusal({{0, 0, 30001}}), HasSubstr("'embed.weight', contributes [0, 30001): the tensor has 30000"));
  EXPECT_THAT(Refusal({{0, 100, 8192}}), HasSubstr("multiples of 4096"));
  EXPECT_THAT(Refusal({{0, 0, 100}}), HasSubstr("multiples of 4096"));
  EXPECT_THAT(Refusal({{0, 8192, 4096}}), HasSubstr("it is empty"));
  EXPECT_THAT(Refusal({{0, 4096, 8192}, {0, 0, 4096}}), HasSubstr("before the range ahead of it ends"));
  v1::AttachRequest twice = Request(0, {{0, 0, 4096}});
  *twice.add_coverage() = twice.coverage(0);
  v1::AttachResponse response;
  EXPECT_THAT(Attach(twice, &response).error_message(), HasSubstr("coverage has tensor 'embed.weight' twice"));
}

}  // namespace
}  // namespace ballast::testing
