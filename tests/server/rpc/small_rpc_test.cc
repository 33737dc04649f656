// Small tensors whose gradients, and whose weights, go several in one message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/batch.h"
#include "proto/checksum.h"

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSmall = 40;

void AddTensor(int64_t elements, v1::RunSpec* spec, uint32_t group = 0) {
  v1::TensorSpec* t = spec->add_tensors();
  t->set_name(absl::StrCat("t", spec->tensors_size()));
  t->add_shape(elements);
  t->set_dtype("bf16");
  t->set_group(group);
}

// Small tensors, between which are one of several chunks and one that is served with scales.
v1::RunSpec MixedSpec() {
  v1::RunSpec spec = MakeSpec("r1", {});
  for (uint32_t i = 0; i < kSmall; ++i) {
    AddTensor(1 + i % 9, &spec);
    if (i == kSmall / 2) AddTensor(30000, &spec);
    if (i == kSmall / 2) AddTensor(64, &spec, 1);
  }
  v1::GroupSpec* scaled = spec.add_groups();
  *scaled = spec.groups(0);
  scaled->set_serving("int8-tensor");
  return spec;
}

void Add(const v1::Gradient& gradient, v1::SmallGradients* small) {
  small->add_tensors(gradient.tensor());
  small->add_sizes(static_cast<uint32_t>(gradient.data().size()));
  small->add_crc32c(gradient.crc32c());
  small->mutable_data()->append(gradient.data());
}

class SmallRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
  Trainer Start(const v1::RunSpec& spec, bool takes_small_weights) {
    Trainer t = StartTrainer(spec);
    Reopen(&t, takes_small_weights);
    return t;
  }
  void Reopen(Trainer* t, bool takes_small_weights) {
    t->wire = std::make_unique<Wire>(trainer_.get());
    v1::Open open;
    open.set_takes_batches(takes_small_weights);
    open.set_takes_small_weights(takes_small_weights);
    ASSERT_TRUE(t->wire->Open(t->token, open));
  }
  // Gradients of one chunk.
  static v1::TrainRequest Several(const Trainer& t, const std::vector<uint32_t>& tensors, uint64_t step) {
    v1::TrainRequest request;
    for (const uint32_t i : tensors) {
      Add(Chunks(t.spec, i, Gradient(t.spec, i, step)).at(0), request.mutable_small_gradients());
    }
    return request;
  }
  // As Step, with all gradients of one chunk in one message.
  StepAnswer StepTogether(Trainer* t, uint64_t step) {
    t->wire->Begin(step);
    std::vector<uint32_t> together;
    for (uint32_t i = 0; i < t->spec.tensors.size(); ++i) {
      const bool small = Chunks(t->spec, i, Gradient(t->spec, i, step)).size() == 1;
      small ? together.push_back(i) : SendAll(*t, i, step);
      t->reference->Update(i, step, Gradient(t->spec, i, step));
    }
    t->wire->Send(Several(*t, together, step));
    t->wire->EndStep();
    return ReadStep(t->wire.get());
  }
  static void ExpectWhole(const Trainer& t, const StepAnswer& answer) {
    ASSERT_TRUE(answer.result);
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    EXPECT_TRUE(answer.checksums_right);
    for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
};

TEST_F(SmallRpcTest, GradientsInOneMessageMakeTheStep) {
  Trainer t = Start(MixedSpec(), /*takes_small_weights=*/false);
  for (const uint64_t step : {1, 2, 3}) {
    const StepAnswer answer = StepTogether(&t, step);
    ASSERT_NO_FATAL_FAILURE(ExpectWhole(t, answer)) << t.wire->Finish().error_message();
    EXPECT_EQ(answer.together, 0u) << "the client did not say that it takes them";
    uint64_t sent = 0;
    for (const TensorSpec& tensor : t.spec.tensors) sent += 2 * tensor.elements;
    EXPECT_EQ(answer.credit, sent);
  }
}

TEST_F(SmallRpcTest, WeightsComeSeveralInAMessageToAClientThatTakesThem) {
  Trainer t = Start(MixedSpec(), /*takes_small_weights=*/true);
  for (const uint64_t step : {1, 2, 3}) {
    const StepAnswer answer = StepTogether(&t, step);
    ASSERT_NO_FATAL_FAILURE(ExpectWhole(t, answer)) << t.wire->Finish().error_message();
    EXPECT_EQ(answer.together, kSmall) << "all but those of several chunks, and those with scales";
  }
}

TEST_F(SmallRpcTest, AMessageHoldsNoMoreWeightsThanItsBound) {
  v1::RunSpec spec = MakeSpec("r1", {});
  for (int i = 0; i < 100; ++i) AddTensor(4096, &spec);
  Trainer t = Start(spec, /*takes_small_weights=*/true);
  const StepAnswer answer = Step(&t, 1);
  ASSERT_NO_FATAL_FAILURE(ExpectWhole(t, answer));
  EXPECT_GT(answer.together, 0u);  // where the trainer reads too slowly, some go alone
  EXPECT_LE(answer.most_together_bytes, kMostJoinedBytes);
}

TEST_F(SmallRpcTest, AfterALostStreamTheyComeAgain) {
  Trainer t = Start(MixedSpec(), /*takes_small_weights=*/true);
  t.wire->Begin(1);
  t.wire->Send(Several(t, {0, 1, 2}, 1));
  ASSERT_TRUE(t.wire->AwaitWeights());
  t.wire->Hang();
  t.token = Resume("r1", t.token).session_token();
  Reopen(&t, true);
  ASSERT_NO_FATAL_FAILURE(ExpectWhole(t, StepTogether(&t, 1)));  // those that came before are acknowledged once more
}

// The stream ends with what is wrong, and the step goes on as if the message had not been sent.
TEST_F(SmallRpcTest, ABadMessageEndsTheStreamAndIsNotUsed) {
  Trainer t = Start(MixedSpec(), /*takes_small_weights=*/true);
  const v1::TrainRequest good = Several(t, {0}, 1);
  const auto changed = [&](auto change) {
    v1::TrainRequest bad = good;
    change(bad.mutable_small_gradients());
    return bad;
  };
  using Small = v1::SmallGradients*;
  const std::pair<v1::TrainRequest, const char*> all[] = {
      {changed([](Small s) { s->Clear(); }), "SmallGradients of 0 tensors"},
      {changed([](Small s) { s->add_tensors(1); }), "of 2 tensors, with 1 sizes and 1 checksums"},
      {changed([](Small s) { s->add_sizes(1); }), "of 1 tensors, with 2 sizes"},
      {changed([](Small s) { s->mutable_crc32c()->Clear(); }), "1 sizes and 0 checksums"},
      {changed([](Small s) { s->mutable_data()->push_back('x'); }), "3 bytes of data, and sizes of 2 bytes"},
      {changed([](Small s) { s->set_sizes(0, UINT32_MAX); }), "sizes of 4294967295 bytes"},
      {changed([](Small s) { s->set_tensors(0, 1000); }), "tensor 1000: the run has 42 tensors"},
      {changed([](Small s) {
         s->set_tensors(0, 1);
         s->mutable_data()->append(4, 'x');
         s->set_sizes(0, 6);
       }),
       "has 6 bytes; wanted: 4"},
      {changed([](Small s) { s->set_crc32c(0, s->crc32c(0) + 1); }), "nothing of it was used"},
      {changed([](Small s) {
         for (int i = 0; i < kMostBatchMessages; ++i) s->add_tensors(0), s->add_sizes(2), s->add_crc32c(0);
       }),
       "wanted: as many of each, from 1 to 1024"},
      {changed([](Small s) { s->set_sizes(0, 70000), s->mutable_data()->resize(70000); }), "at most 65536"},
  };
  for (const auto& [bad, says] : all) {
    t.wire->Begin(1);
    t.wire->Send(bad);
    EXPECT_THAT(t.wire->Finish().error_message(), HasSubstr(says));
    t.token = Resume("r1", t.token).session_token();
    Reopen(&t, true);
  }
  ExpectWhole(t, StepTogether(&t, 1));
}

}  // namespace
}  // namespace ballast::testing
