// Averages of the weights, kept by the daemon and read like weights: what moves them, what they are after a load, a rewind
// and a crash, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "proto/checksum.h"

#include "server/plan/plan.h"
#include "tests/server/rpc/amend_fixture.h"
#include "tests/server/rpc/stored_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<double> kDecays = {0.9, 0.999};

class AveragesRpcTest : public AmendRpcTest {
 protected:
  static v1::RunSpec Averaging(v1::RunSpec spec) {
    for (const double decay : kDecays) spec.add_averages(decay);
    return spec;
  }
  static v1::PullRequest Request(double decay, const std::string& slot, uint64_t step = 0) {
    v1::PullRequest request;
    request.set_run_id("r1");
    request.add_slots(slot);
    request.set_average(decay);
    request.set_step(step);
    return request;
  }
  grpc::Status Pull(const v1::PullRequest& request, std::map<uint32_t, std::string>* pulled) {
    grpc::ClientContext context;
    const auto reader = trainer_->Pull(&context, request);
    v1::Weights w;
    while (reader->Read(&w)) {
      EXPECT_EQ(Crc32c(Bytes(w.data())), w.crc32c());
      EXPECT_EQ(w.average(), request.average());
      std::string& bytes = (*pulled)[w.tensor()];
      if (w.chunk() == 0) bytes.clear();
      bytes += w.data();
    }
    return reader->Finish();
  }
  // Both averages of all tensors, as they are served and whole.
  void ExpectAverages(const RunSpec& spec, const Reference& reference, uint64_t step = 0) {
    for (size_t a = 0; a < kDecays.size(); ++a) {
      std::map<uint32_t, std::string> served, whole;
      ASSERT_TRUE(Pull(Request(kDecays[a], "weights", step), &served).ok());
      ASSERT_TRUE(Pull(Request(kDecays[a], "master", step), &whole).ok());
      for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
        EXPECT_TRUE(served[i] == reference.EncodeAverage(i, a)) << "tensor " << i << ", average " << a;
        const std::vector<float> values = reference.Averaged(i, a);
        EXPECT_TRUE(whole[i] ==
                    std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)))
            << "tensor " << i << ", average " << a;
      }
    }
  }
  // Of steps 1 to `steps` of StartTrainer's run.
  static Reference Trained(const RunSpec& spec, uint64_t steps) {
    Reference reference(spec);
    for (uint32_t i = 0; i < spec.tensors.size(); ++i) reference.Load(i, Weights(spec, i));
    for (uint64_t step = 1; step <= steps; ++step) {
      for (uint32_t i = 0; i < spec.tensors.size(); ++i) reference.Update(i, step, Gradient(spec, i, step));
    }
    return reference;
  }
  std::string RefusalOf(const v1::RunSpec& spec) { return std::string(CreateRun(spec).status().message()); }
};

TEST_F(AveragesRpcTest, BeginAsTheWeightsThatAreLoadedAndFollowThem) {
  Trainer t = StartTrainer(Averaging(SmallSpec()));
  ExpectAverages(t.spec, *t.reference);
  for (uint64_t step = 1; step <= 4; ++step) {
    Step(&t, step);
    ExpectAverages(t.spec, *t.reference);
  }
}

// With scales, which are computed anew for each of the series that is sent.
TEST_F(AveragesRpcTest, GoOutAsTheWeightsDo) {
  for (const char* serving : {"fp32", "fp16", "fp8-e4m3", "int8-row", "int8-tensor"}) {
    SCOPED_TRACE(serving);
    v1::RunSpec spec = Averaging(SmallSpec());
    spec.mutable_groups(0)->set_serving(serving);
    Trainer t = StartTrainer(spec);
    for (uint64_t step = 1; step <= 3; ++step) {
      ExpectSteps(&t, step, step);
      ExpectAverages(t.spec, *t.reference);
    }
    t.wire.reset();
    server_.reset();
    StartServer();
  }
}

TEST_F(AveragesRpcTest, AreKeptOfEveryMasterFormat) {
  for (const kernels::MasterFormat& master : kernels::MasterFormats()) {
    SCOPED_TRACE(master.name);
    v1::RunSpec spec = Averaging(SmallSpec());
    spec.mutable_groups(0)->set_master(master.name);
    if (std::string(master.name) == "mcf") {
      spec.mutable_groups(0)->set_rule("collage_light");
      spec.mutable_groups(0)->set_state("bf16");
    }
    Trainer t = StartTrainer(spec);
    for (uint64_t step = 1; step <= 2; ++step) Step(&t, step);
    ExpectAverages(t.spec, *t.reference);
    t.wire.reset();
    server_.reset();
    StartServer();
  }
}

// A step averages tensors that had no gradient in it, too, as torch's AveragedModel does.
TEST_F(AveragesRpcTest, AnAppliedStepAveragesAllTensors) {
  Trainer t = StartTrainer(Averaging(SmallSpec()));
  Step(&t, 1);
  for (uint64_t step = 2; step <= 4; ++step) {
    t.wire->Begin(step);
    SendAll(t, 0, step);
    t.reference->Update(0, step, Gradient(t.spec, 0, step));
    t.wire->EndStep(std::string(1, '\x06'));
    EXPECT_EQ(ReadStep(t.wire.get()).result->outcome(), v1::STEP_OUTCOME_APPLIED);
    for (const uint32_t i : {1u, 2u}) t.reference->Average(i, step);
    ExpectAverages(t.spec, *t.reference);
  }
}

TEST_F(AveragesRpcTest, ASkippedStepAveragesNothing) {
  v1::RunSpec spec = Averaging(StagedSpec());
  spec.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
  Team team = StartTeam(spec, 1);
  ExpectStep(&team, 1, 1, 1);
  ExpectStep(&team, 2, 1, 1);
  team.poisoned.insert({3, 1});
  SendStep(&team, 3, {});
  EXPECT_EQ(ReadStep(team.wires[0].get()).result->outcome(), v1::STEP_OUTCOME_SKIPPED);
  ExpectAverages(team.spec, *team.reference);
  ExpectStep(&team, 4, 1, 1);
  ExpectAverages(team.spec, *team.reference);
}

TEST_F(AveragesRpcTest, APartialStepAveragesWhatItHasUpdated) {
  v1::RunSpec spec = Averaging(SmallSpec());
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  t.wire->Begin(2);
  SendAll(t, 1, 2);
  t.reference->Update(1, 2, Gradient(t.spec, 1, 2));
  ASSERT_TRUE(t.wire->AwaitWeights());
  const v1::AttachResponse again = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(again.last_result().outcome(), v1::STEP_OUTCOME_PARTIAL);
  ExpectAverages(t.spec, *t.reference);
}

TEST_F(AveragesRpcTest, HoldForEightRanksReleasedAndStaged) {
  for (const auto commit : {v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED}) {
    v1::RunSpec spec = Averaging(SmallSpec());
    spec.set_commit(commit);
    Team team = StartTeam(spec, 8);
    for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1.0f / 8);
    ExpectAverages(team.spec, *team.reference);
    team.wires.clear();
    server_.reset();
    StartServer();
  }
}

TEST_F(AveragesRpcTest, BeginAnewWithWeightsThatReplaceOthers) {
  Trainer t = StartTrainer(Averaging(SmallSpec()));
  for (uint64_t step = 1; step <= 2; ++step) Step(&t, step);
  ASSERT_TRUE(LoadAdded(t.spec, t.token, 0).ok());
  for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) t.reference->Load(i, Weights(t.spec, i));
  ExpectAverages(t.spec, *t.reference);
  t.wire.reset();
  t.token = AttachFresh("r1").session_token();
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(t.token));
  ExpectSteps(&t, 3, 4);
  ExpectAverages(t.spec, *t.reference);
}

TEST_F(AveragesRpcTest, ARewindTakesThemBack) {
  v1::RunSpec spec = Averaging(SmallSpec());
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  Trainer t = StartTrainer(spec);
  for (uint64_t step = 1; step <= 3; ++step) Step(&t, step);
  ExpectAverages(t.spec, Trained(t.spec, 2), 2);  // of the snapshot
  ASSERT_TRUE(RewindTo(2).ok());
  ExpectAverages(t.spec, Trained(t.spec, 2));
  t.wire.reset();
  t.token = AttachFresh("r1").session_token();
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(t.token));
  t.reference = std::make_unique<Reference>(Trained(t.spec, 2));
  ExpectSteps(&t, 3, 5);
  ExpectAverages(t.spec, Trained(t.spec, 5));
}

// To the first step, whose averages are copies, and on from there.
TEST_F(AveragesRpcTest, ARewindToBeforeTheyBeganBeginsThemAnew) {
  v1::RunSpec spec = Averaging(SmallSpec());
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  spec.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  Team team = StartTeam(spec, 1);
  team.poisoned.insert({1, 1});
  SendStep(&team, 1, {});
  EXPECT_EQ(ReadStep(team.wires[0].get()).result->outcome(), v1::STEP_OUTCOME_SKIPPED);
  ExpectStep(&team, 2, 1, 1);
  ASSERT_TRUE(RewindTo(1).ok());
  team.reference = std::make_unique<Reference>(team.spec);
  for (uint32_t i = 0; i < team.spec.tensors.size(); ++i) team.reference->Load(i, Weights(team.spec, i));
  ExpectAverages(team.spec, *team.reference);
  Attach(&team);
  OpenStreams(&team);
  for (uint64_t step = 2; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
  ExpectAverages(team.spec, *team.reference);
}

TEST_F(AveragesRpcTest, AnAmendmentKeepsThemAndCannotChangeThem) {
  const v1::RunSpec spec = Averaging(Spec());
  Team team = StartTeam(spec, 1);
  for (uint64_t step = 1; step <= 2; ++step) ExpectStep(&team, step, 1, 1);
  v1::RunSpec other = spec;
  other.add_averages(0.99);
  const grpc::Status refused = Amend(team.tokens[0], other);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("averages"));
  v1::RunSpec grown = Grown(spec);
  grown.mutable_groups(0)->set_state("fp32");  // its tensors are stored otherwise, and their averages are copied
  const grpc::Status amended = Amend(team.tokens[0], grown);
  ASSERT_TRUE(amended.ok()) << amended.error_message();
  Follow(&team, grown);
  ExpectAverages(team.spec, *team.reference);
  for (uint64_t step = 3; step <= 4; ++step) ExpectStep(&team, step, 1, 1);
  ExpectAverages(team.spec, *team.reference);
}

TEST_F(AveragesRpcTest, TheirBytesAreThosePlanned) {
  const v1::RunSpec spec = Averaging(SmallSpec());
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  const v1::RunStatus status = Status("r1");
  EXPECT_GT(status.plan().server().averages(), 0u);
  EXPECT_EQ(status.bytes().averages(), status.plan().server().averages());
  EXPECT_EQ(status.bytes().staging(), status.plan().server().staging());
  uint64_t elements = 0;
  for (const TensorSpec& tensor : t.spec.tensors) elements += kernels::PaddedElements(tensor.elements);
  EXPECT_EQ(status.bytes().averages(), 2 * 3 * elements);
  EXPECT_EQ(Made(SmallSpec()).averages.size(), 0u);
  EXPECT_EQ(MakePlan(Made(SmallSpec())).bytes.averages, 0u);
}

TEST_F(AveragesRpcTest, DecaysThatCannotBeAreRefusedByName) {
  const auto with = [](std::vector<double> decays) {
    v1::RunSpec spec = SmallSpec();
    for (const double decay : decays) spec.add_averages(decay);
    return spec;
  };
  EXPECT_THAT(RefusalOf(with({0.9, 1})), HasSubstr("averages[1] is 1; wanted: a decay above 0 and below 1"));
  EXPECT_THAT(RefusalOf(with({0})), HasSubstr("averages[0] is 0; wanted"));
  EXPECT_THAT(RefusalOf(with({-0.5})), HasSubstr("averages[0] is -0.5; wanted"));
  EXPECT_THAT(RefusalOf(with({std::nan("")})), HasSubstr("averages[0] is nan; wanted"));
  EXPECT_THAT(RefusalOf(with({0.9999, 0.9999})), HasSubstr("averages[1] is 0.9999, which is there twice"));
  EXPECT_THAT(RefusalOf(with({0.1, 0.2, 0.3, 0.4, 0.5})), HasSubstr("averages has 5 entries; wanted: at most 4"));
}

TEST_F(AveragesRpcTest, ReadersAreToldWhatThereIs) {
  Trainer t = StartTrainer(Averaging(SmallSpec()));
  std::map<uint32_t, std::string> pulled;
  const auto refusal = [&](const v1::PullRequest& request) {
    const grpc::Status s = Pull(request, &pulled);
    EXPECT_EQ(s.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    return s.error_message();
  };
  EXPECT_THAT(refusal(Request(0.99, "weights")), HasSubstr("no average of its weights with the decay 0.99; it keeps "
                                                           "0.9, 0.999"));
  EXPECT_THAT(refusal(Request(0.9, "momentum")), HasSubstr("an average has no momentum"));
  v1::PullRequest compared = Request(0.9, "weights");
  compared.add_tensors(0);
  compared.add_digests(1);
  EXPECT_THAT(refusal(compared), HasSubstr("digests are of the weights, not of an average"));
}

// --- crashes ----------------------------------------------------------------------------------------------------------

class StoredAveragesRpcTest : public Stored<AveragesRpcTest> {
 protected:
  void Rejoin(Team* team) {
    team->wires.resize(1);
    Attach(team);
    OpenStreams(team);
  }
  // Without a gradient for tensor 1.
  void ExpectStepOfTheOthers(Team* team, uint64_t step) {
    Wire* const wire = team->wires[0].get();
    wire->Begin(step);
    for (const uint32_t i : {0u, 2u}) {
      for (const v1::Gradient& chunk : Chunks(team->spec, i, GradientOf(*team, i, step, 0, 0))) wire->Chunk(chunk);
      team->reference->UpdateBySum(i, step, SumOf(*team, i, step, 1), 1);
    }
    wire->EndStep(std::string(1, '\x02'));
    EXPECT_EQ(ReadStep(wire).result->outcome(), v1::STEP_OUTCOME_APPLIED);
    team->reference->Average(1, step);
  }
};

TEST_F(StoredAveragesRpcTest, AJournalReplaysThemToTheBit) {
  v1::RunSpec spec = Averaging(SmallSpec());
  spec.mutable_checkpoint()->set_durability(v1::DURABILITY_MODE_JOURNAL_SYNC);
  Team team = StartTeam(spec, 1);
  for (uint64_t step = 1; step <= 2; ++step) ExpectStep(&team, step, 1, 1);
  ExpectStepOfTheOthers(&team, 3);
  ExpectAverages(team.spec, *team.reference);
  Crash(&team);
  Rejoin(&team);
  ASSERT_EQ(Status("r1").step(), 3u);
  ExpectAverages(team.spec, *team.reference);
  for (uint64_t step = 4; step <= 5; ++step) ExpectStep(&team, step, 1, 1);
  ExpectAverages(team.spec, *team.reference);
}

TEST_F(StoredAveragesRpcTest, ACheckpointKeepsThem) {
  Team team = StartTeam(Averaging(SmallSpec()), 1);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
  grpc::ClientContext context;
  v1::CheckpointRequest request;
  request.set_run_id("r1");
  v1::CheckpointResponse written;
  ASSERT_TRUE(admin_->Checkpoint(&context, request, &written).ok());
  StartAgain("first", &team);
  Rejoin(&team);
  ASSERT_EQ(Status("r1").step(), 3u);
  ExpectAverages(team.spec, *team.reference);
  for (uint64_t step = 4; step <= 5; ++step) ExpectStep(&team, step, 1, 1);
  ExpectAverages(team.spec, *team.reference);
}

}  // namespace
}  // namespace ballast::testing
