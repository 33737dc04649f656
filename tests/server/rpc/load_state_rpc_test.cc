// Optimizer state that comes from elsewhere: the run goes on as if it had made it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using kernels::PlaneKind;
using ::testing::AllOf;
using ::testing::HasSubstr;

class LoadStateRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }

  // Weights and updates keep every bit; with nearest rounding none of them depends on the step's number.
  static v1::RunSpec Spec(const std::string& run_id, const std::string& state, const std::string& rule = "adamw") {
    v1::RunSpec spec = MakeSpec(run_id, {{"w", {90, 100}, "fp32"}, {"b", {5}, "fp32"}});
    spec.mutable_groups(0)->set_rule(rule);
    spec.mutable_groups(0)->set_master("fp32");
    spec.mutable_groups(0)->set_state(state);
    spec.mutable_groups(0)->set_rounding("nearest");
    return spec;
  }

  // A run's upload, slot by slot.
  struct Upload {
    grpc::ClientContext context;
    v1::LoadStateResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::LoadStateRequest>> writer;
    std::string token;
    const RunSpec* spec = nullptr;

    void Send(uint32_t tensor, const std::string& slot, const std::vector<float>& values) {
      for (uint64_t k = 0; k < ChunkCount(*spec, spec->tensors[tensor]); ++k) {
        v1::LoadStateRequest request = LoadRequest(*spec, token, tensor, k, values);
        request.set_slot(slot);
        writer->Write(request);
      }
    }
    void SendUpdates(uint32_t tensor, uint64_t updates) {
      v1::LoadStateRequest request;
      request.set_session_token(token);
      request.set_tensor(tensor);
      request.set_slot("updates");
      request.set_updates(updates);
      writer->Write(request);
    }
    grpc::Status End() {
      writer->WritesDone();
      return writer->Finish();
    }
  };
  std::unique_ptr<Upload> Begin(const RunSpec& spec, const std::string& token) {
    auto upload = std::make_unique<Upload>();
    upload->writer = trainer_->LoadState(&upload->context, &upload->response);
    upload->token = token;
    upload->spec = &spec;
    return upload;
  }
  // A run without weights, attached to.
  Trainer Create(const v1::RunSpec& wire_spec) {
    EXPECT_TRUE(CreateRun(wire_spec).ok());
    Trainer t{.spec = ToRunSpec(wire_spec, config_.limits).value()};
    t.token = AttachFresh(t.spec.run_id).session_token();
    return t;
  }
  void SendWeights(Upload* upload) {
    for (uint32_t i = 0; i < upload->spec->tensors.size(); ++i) upload->Send(i, "weights", Weights(*upload->spec, i));
  }
  static std::vector<float> Floats(const std::string& bytes) {
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

TEST_F(LoadStateRpcTest, ARunGoesOnToTheBitFromStateOfAnother) {
  for (const char* state : {"fp32", "bf16", "companded8", "flash8"}) {
    SCOPED_TRACE(state);
    Trainer first = StartTrainer(Spec(std::string("first-") + state, state));
    for (uint64_t step = 1; step <= 3; ++step) Step(&first, step);
    Trainer second = Create(Spec(std::string("second-") + state, state));
    const auto upload = Begin(second.spec, second.token);
    for (uint32_t i = 0; i < 2; ++i) {
      upload->SendUpdates(i, 3);
      for (const auto& [slot, kind] :
           {std::pair{"variance", PlaneKind::kVariance}, {"momentum", PlaneKind::kMomentum}}) {
        upload->Send(i, slot, first.reference->State(i, kind));
      }
      upload->Send(i, "weights", Floats(first.reference->EncodeWeights(i)));
    }
    const grpc::Status loaded = upload->End();
    ASSERT_TRUE(loaded.ok()) << loaded.error_message();

    second.wire = std::make_unique<Wire>(trainer_.get());
    ASSERT_TRUE(second.wire->Open(second.token));
    for (uint64_t step = 1; step <= 3; ++step) {
      second.wire->Begin(step);
      for (uint32_t i = 0; i < 2; ++i) {
        const std::string gradient = Gradient(first.spec, i, 3 + step);
        for (const v1::Gradient& chunk : Chunks(second.spec, i, gradient)) second.wire->Chunk(chunk);
        first.reference->Update(i, 3 + step, gradient);
      }
      second.wire->EndStep();
      const StepAnswer answer = ReadStep(second.wire.get());
      for (uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(Equal(answer, *first.reference, i)) << "step " << step;
    }
  }
}

TEST_F(LoadStateRpcTest, StateInPartIsRefusedAndNamed) {
  Trainer t = Create(Spec("r1", "fp32"));
  auto upload = Begin(t.spec, t.token);
  SendWeights(upload.get());
  upload->Send(1, "momentum", std::vector<float>(5, 0.5f));
  const grpc::Status refused = upload->End();
  EXPECT_EQ(refused.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), AllOf(HasSubstr("'b' has state that was sent in part"), HasSubstr("updates not"),
                                             HasSubstr("momentum 1 of 1 chunks"), HasSubstr("variance 0 of 1 chunks")));
  upload = Begin(t.spec, t.token);
  SendWeights(upload.get());
  for (const char* slot : {"momentum", "variance"}) upload->Send(1, slot, std::vector<float>(5, 0.5f));
  upload->SendUpdates(1, 7);
  EXPECT_TRUE(upload->End().ok());
}

// The trainer then goes on without moments, as if the first call had never been.
TEST_F(LoadStateRpcTest, AnUploadAfterOneWithStateStartsAnew) {
  for (const char* state : {"fp32", "companded8", "dynamic8"}) {
    for (const bool whole : {false, true}) {
      SCOPED_TRACE(std::string(state) + (whole ? ", after one that was whole" : ", after one that failed"));
      Trainer t = Create(Spec(std::string(state) + (whole ? "-whole" : "-part"), state));
      auto upload = Begin(t.spec, t.token);
      SendWeights(upload.get());
      for (uint32_t i = 0; i < 2; ++i) {
        const std::vector<float> moments(t.spec.tensors[i].elements, 0.5f);
        for (const char* slot : {"momentum", "variance"}) upload->Send(i, slot, moments);
        if (whole) upload->SendUpdates(i, 7);
      }
      EXPECT_EQ(upload->End().ok(), whole);
      upload = Begin(t.spec, t.token);
      SendWeights(upload.get());
      const grpc::Status loaded = upload->End();
      ASSERT_TRUE(loaded.ok()) << loaded.error_message();
      t.reference = std::make_unique<Reference>(t.spec);
      for (uint32_t i = 0; i < 2; ++i) t.reference->Load(i, Weights(t.spec, i));
      t.wire = std::make_unique<Wire>(trainer_.get());
      ASSERT_TRUE(t.wire->Open(t.token));
      for (uint64_t step = 1; step <= 2; ++step) {
        const StepAnswer answer = Step(&t, step);
        for (uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << "step " << step;
      }
    }
  }
}

TEST_F(LoadStateRpcTest, SmallStateMessagesMayComeInABatch) {
  EXPECT_TRUE(CreateRun(Spec("r1", "fp32")).ok());
  Trainer t{.spec = ToRunSpec(Spec("r1", "fp32"), config_.limits).value()};
  const v1::AttachResponse attached = AttachFresh("r1");
  EXPECT_TRUE(attached.takes_load_batches());
  t.token = attached.session_token();
  v1::LoadStateRequest all;
  all.set_session_token(t.token);
  for (uint32_t i = 0; i < 2; ++i) {
    for (uint64_t k = 0; k < ChunkCount(t.spec, t.spec.tensors[i]); ++k) {
      *all.add_batch() = LoadRequest(t.spec, "", i, k, Weights(t.spec, i));
    }
  }
  const auto load = [&](const v1::LoadStateRequest& request) {
    const auto upload = Begin(t.spec, t.token);
    upload->writer->Write(request);
    const grpc::Status status = upload->End();
    return std::pair(status, upload->response);
  };
  const auto [loaded, response] = load(all);
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  Reference reference(t.spec);
  for (uint32_t i = 0; i < 2; ++i) {
    reference.Load(i, Weights(t.spec, i));
    EXPECT_EQ(response.digests(static_cast<int>(i)), reference.Digest(i));
  }

  v1::LoadStateRequest spoiled = all;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *spoiled.mutable_batch(1) = LoadRequest(t.spec, "", 1, 0, {1, nan, 3, 4, 5});
  EXPECT_THAT(load(spoiled).first.error_message(), HasSubstr("tensor 'b' holds a NaN"));
  spoiled = all;
  *spoiled.mutable_batch(0)->add_batch() = all.batch(0);
  EXPECT_THAT(load(spoiled).first.error_message(), HasSubstr("a batch in a batch"));
  spoiled.clear_batch();
  for (int i = 0; i < 1025; ++i) *spoiled.add_batch() = LoadRequest(t.spec, "", 1, 0, Weights(t.spec, 1));
  EXPECT_THAT(load(spoiled).first.error_message(), HasSubstr("a batch of 1025 messages, wanted at most 1024"));
  EXPECT_TRUE(load(all).first.ok());
}

TEST_F(LoadStateRpcTest, ValuesThatTheFormatCannotHoldAreRefusedByTensor) {
  Trainer t = Create(Spec("r1", "companded8"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1.0f}) {
    const auto upload = Begin(t.spec, t.token);
    upload->Send(1, "variance", {1, 2, bad, 4, 5});
    const grpc::Status refused = upload->End();
    EXPECT_EQ(refused.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(refused.error_message(), HasSubstr("'b': a value of its variance is not finite"));
  }
}

TEST_F(LoadStateRpcTest, StateThatTheRuleDoesNotKeepIsRefused) {
  Trainer t = Create(Spec("r1", "fp32", "lion"));
  auto upload = Begin(t.spec, t.token);
  upload->Send(1, "variance", std::vector<float>(5));
  EXPECT_THAT(upload->End().error_message(), HasSubstr("lion with state fp32 has no variance"));
  upload = Begin(t.spec, t.token);
  upload->Send(1, "exp_avg", std::vector<float>(5));
  EXPECT_THAT(upload->End().error_message(), HasSubstr("there are weights, momentum, variance and updates"));
  upload = Begin(t.spec, t.token);
  upload->SendUpdates(1, std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(upload->End().error_message(), HasSubstr("wanted at most"));
  upload = Begin(t.spec, t.token);
  SendWeights(upload.get());
  upload->Send(1, "momentum", std::vector<float>(5, 0.5f));
  upload->SendUpdates(1, 7);
  EXPECT_TRUE(upload->End().ok());
}

}  // namespace
}  // namespace ballast::testing
