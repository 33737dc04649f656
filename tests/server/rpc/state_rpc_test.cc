// Weights and optimizer state out of a run, and in place of what a run has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "proto/checksum.h"
#include "proto/rewound.h"

#include "tests/eventually.h"
#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {
namespace {

using kernels::PlaneKind;
using ::testing::HasSubstr;

const std::vector<std::string> kAll = {"master", "momentum", "variance", "updates"};

// What a Pull with slots brought, by tensor and slot.
struct Pulled {
  std::map<std::pair<uint32_t, std::string>, std::string> bytes;
  std::map<uint32_t, std::set<uint64_t>> labels, updates;  // that its messages had since it last began
  std::map<uint32_t, uint64_t> lasts;                      // messages that ended it
  std::vector<float> Floats(uint32_t tensor, const std::string& slot) const {
    const std::string& all = bytes.at({tensor, slot});
    std::vector<float> values(all.size() / 4);
    std::memcpy(values.data(), all.data(), all.size());
    return values;
  }
};

class StateRpcTest : public TeamRpcTest {
 protected:
  static v1::RunSpec Spec(const std::string& state = "fp32", const std::string& rule = "adamw") {
    v1::RunSpec spec = MakeSpec("r1", {{"w", {90, 100}, "fp32"}, {"b", {5}, "fp32"}});
    spec.mutable_groups(0)->set_rule(rule);
    spec.mutable_groups(0)->set_master("fp32");
    spec.mutable_groups(0)->set_state(state);
    spec.mutable_groups(0)->set_rounding("nearest");
    return spec;
  }
  static v1::PullRequest Request(const std::vector<std::string>& slots) {
    v1::PullRequest request;
    request.set_run_id("r1");
    for (const std::string& slot : slots) request.add_slots(slot);
    return request;
  }
  // between: called with each message.
  grpc::Status Pull(
      const v1::PullRequest& request, Pulled* pulled, const std::function<void()>& between = [] {}) {
    grpc::ClientContext context;
    const auto reader = trainer_->Pull(&context, request);
    v1::Weights w;
    while (reader->Read(&w)) {
      EXPECT_EQ(Crc32c(Bytes(w.data())), w.crc32c());
      if (w.chunk() == 0 && w.slot() == request.slots(0)) pulled->labels[w.tensor()].clear();
      std::string& bytes = pulled->bytes[{w.tensor(), w.slot()}];
      if (w.chunk() == 0) bytes.clear();
      bytes += w.data();
      pulled->labels[w.tensor()].insert(w.step());
      if (w.slot() == "updates") pulled->updates[w.tensor()] = {w.updates()};
      pulled->lasts[w.tensor()] += w.last() ? 1 : 0;
      between();
    }
    return reader->Finish();
  }
  void ExpectState(const Pulled& pulled, const Reference& reference, uint64_t updates) {
    for (uint32_t i = 0; i < 2; ++i) {
      EXPECT_EQ(pulled.bytes.at({i, "master"}), reference.EncodeWeights(i)) << i;
      EXPECT_EQ(pulled.Floats(i, "momentum"), reference.State(i, PlaneKind::kMomentum)) << i;
      EXPECT_EQ(pulled.Floats(i, "variance"), reference.State(i, PlaneKind::kVariance)) << i;
      EXPECT_EQ(pulled.updates.at(i), std::set{updates}) << i;
      EXPECT_EQ(pulled.lasts.at(i), 1u) << i;
    }
  }

  // A LoadState with replace: what is sent, in the order given.
  struct Slot {
    uint32_t tensor;
    std::string name;
    std::vector<float> values = {};
    uint64_t updates = 0;
  };
  grpc::Status Replace(const RunSpec& spec, const std::string& token, const std::vector<Slot>& slots) {
    grpc::ClientContext context;
    v1::LoadStateResponse response;
    const auto writer = trainer_->LoadState(&context, &response);
    for (const Slot& slot : slots) {
      const bool counts = slot.name == "updates";
      for (uint64_t k = 0; k < (counts ? 1 : ChunkCount(spec, spec.tensors[slot.tensor])); ++k) {
        v1::LoadStateRequest request;
        if (!counts) request = LoadRequest(spec, token, slot.tensor, k, slot.values);
        request.set_session_token(token);
        request.set_tensor(slot.tensor);
        request.set_slot(slot.name);
        request.set_updates(slot.updates);
        request.set_replace(true);
        writer->Write(request);
      }
    }
    writer->WritesDone();
    return writer->Finish();
  }
  static std::vector<float> Ramp(const RunSpec& spec, uint32_t tensor, float scale) {
    std::vector<float> values(spec.tensors[tensor].elements);
    for (size_t i = 0; i < values.size(); ++i) values[i] = scale * static_cast<float>(i % 17 + 1);
    return values;
  }
  // All of both tensors, as the reference then has it too.
  std::vector<Slot> Everything(Team* team, float scale, uint64_t updates) {
    std::vector<Slot> slots;
    for (uint32_t i = 0; i < 2; ++i) {
      slots.push_back({i, "weights", Ramp(team->spec, i, scale)});
      slots.push_back({i, "momentum", Ramp(team->spec, i, scale / 2)});
      slots.push_back({i, "variance", Ramp(team->spec, i, scale / 4)});
      slots.push_back({i, "updates", {}, updates});
      team->reference->Load(i, slots[slots.size() - 4].values);
      team->reference->LoadState(i, PlaneKind::kMomentum, slots[slots.size() - 3].values);
      team->reference->LoadState(i, PlaneKind::kVariance, slots[slots.size() - 2].values);
    }
    return slots;
  }
  static void ExpectRewound(Wire* wire, uint64_t step) {
    const grpc::Status s = wire->Finish();
    EXPECT_EQ(RewoundTo(absl::Status(static_cast<absl::StatusCode>(s.error_code()), s.error_message())), step)
        << s.error_message();
  }
  void Rejoin(Team* team) {
    const auto world = static_cast<uint32_t>(team->wires.size());
    for (uint32_t rank = 0; rank < world; ++rank) {
      team->tokens[rank] = AttachFresh("r1", false, rank, world).session_token();
    }
    for (uint32_t rank = 0; rank < world; ++rank) {
      team->wires[rank] = std::make_unique<Wire>(trainer_.get());
      EXPECT_TRUE(team->wires[rank]->Open(team->tokens[rank]));
    }
  }
};

TEST_F(StateRpcTest, APullBringsWeightsAndStateOfOneUpdate) {
  for (const char* state : {"fp32", "bf16", "companded8", "dynamic8"}) {
    SCOPED_TRACE(state);
    v1::RunSpec spec = Spec(state);
    spec.mutable_rewind()->set_snapshots(1);
    spec.mutable_rewind()->set_every(2);
    Trainer t = StartTrainer(spec);
    for (uint64_t step = 1; step <= 2; ++step) Step(&t, step);
    Pulled pulled;
    ASSERT_TRUE(Pull(Request(kAll), &pulled).ok());
    ExpectState(pulled, *t.reference, 2);
    Step(&t, 3);
    v1::PullRequest of_snapshot = Request(kAll);
    of_snapshot.set_step(2);
    Pulled snapshot, latest;
    ASSERT_TRUE(Pull(of_snapshot, &snapshot).ok());
    EXPECT_EQ(snapshot.bytes, pulled.bytes);
    EXPECT_EQ(snapshot.updates, pulled.updates);
    ASSERT_TRUE(Pull(Request({"weights", "updates", "variance", "momentum", "master"}), &latest).ok());
    ExpectState(latest, *t.reference, 3);
    EXPECT_EQ((latest.bytes[{0, ""}]), t.reference->EncodeWeights(0));
    t.wire.reset();
    server_.reset();
    StartServer();
  }
}

// A step after every message that is read: the tensor begins anew, and then a copy of it is sent.
TEST_F(StateRpcTest, EachTensorIsOfOneUpdateOverItsSlotsWhileTrainingGoesOn) {
  v1::RunSpec spec = MakeSpec("r1", {{"w", {400, 500}, "fp32"}});
  spec.mutable_groups(0)->set_master("fp32");
  Trainer t = StartTrainer(spec);
  std::map<uint64_t, std::vector<std::vector<float>>> of_updates;
  uint64_t step = 0;
  const auto keep = [&] {
    of_updates[step] = {t.reference->State(0, PlaneKind::kMomentum), t.reference->State(0, PlaneKind::kVariance)};
  };
  keep();
  Pulled pulled;
  ASSERT_TRUE(Pull(Request({"momentum", "variance", "updates"}), &pulled, [&] {
                if (step == 8) return;
                Step(&t, ++step);
                keep();
              }).ok());
  const uint64_t of = *pulled.updates.at(0).begin();
  EXPECT_EQ(pulled.labels.at(0), std::set{of});
  EXPECT_EQ(pulled.Floats(0, "momentum"), of_updates.at(of)[0]);
  EXPECT_EQ(pulled.Floats(0, "variance"), of_updates.at(of)[1]);
  EXPECT_EQ(pulled.lasts.at(0), 1u);
}

TEST_F(StateRpcTest, SlotsThatThereAreNotAreRefusedOrLeftOut) {
  Trainer t = StartTrainer(Spec("fp32", "lion"));
  Pulled pulled;
  EXPECT_THAT(Pull(Request({"exp_avg"}), &pulled).error_message(),
              HasSubstr("'exp_avg'; there are weights, master, momentum, variance, updates"));
  EXPECT_THAT(Pull(Request({"master", "master"}), &pulled).error_message(), HasSubstr("'master' twice"));
  v1::PullRequest compared = Request({"master"});
  compared.add_digests(1);
  EXPECT_THAT(Pull(compared, &pulled).error_message(), HasSubstr("digests are of weights as served"));
  ASSERT_TRUE(Pull(Request({"momentum", "variance"}), &pulled).ok());
  EXPECT_EQ(pulled.bytes.size(), 2u);
  EXPECT_EQ(pulled.Floats(1, "momentum"), std::vector<float>(5));
  EXPECT_EQ(pulled.lasts.at(1), 1u);
  pulled = {};
  ASSERT_TRUE(Pull(Request({"variance"}), &pulled).ok());
  EXPECT_TRUE(pulled.bytes.empty());
}

TEST_F(StateRpcTest, ARunGoesOnFromWhatReplacesItsStateAndAllRanksHearOfIt) {
  for (const uint32_t world : {1u, 2u, 8u}) {
    SCOPED_TRACE(world);
    Team team = StartTeam(Spec(), world);
    for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1.0f / static_cast<float>(world));
    ASSERT_TRUE(Replace(team.spec, team.tokens[world - 1], Everything(&team, 0.125f, 3)).ok());
    for (const auto& wire : team.wires) ExpectRewound(wire.get(), 3);
    EXPECT_EQ(Status("r1").generation(), 2u);
    EXPECT_EQ(Status("r1").step(), 3u);
    Pulled pulled;
    ASSERT_TRUE(Pull(Request(kAll), &pulled).ok());
    ExpectState(pulled, *team.reference, 3);
    Rejoin(&team);
    for (uint64_t step = 4; step <= 5; ++step) ExpectStep(&team, step, 1, 1.0f / static_cast<float>(world));
    team.wires.clear();
    server_.reset();
    StartServer();
  }
}

TEST_F(StateRpcTest, WhatIsNotSentStaysAsItIs) {
  Team team = StartTeam(Spec("companded8"), 1);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
  const std::vector<float> weights = Ramp(team.spec, 1, 0.5f);
  ASSERT_TRUE(Replace(team.spec, team.tokens[0], {{1, "weights", weights}}).ok());
  team.reference->Load(1, weights);
  ExpectRewound(team.wires[0].get(), 3);
  Rejoin(&team);
  for (uint64_t step = 4; step <= 6; ++step) ExpectStep(&team, step, 1, 1);
}

TEST_F(StateRpcTest, AReplacementIsRefusedWhileAStepIsOpenAndChangesNothing) {
  Team team = StartTeam(Spec(), 2);
  ExpectStep(&team, 1, 1, 0.5f);
  team.wires[0]->Begin(2);
  team.wires[0]->Chunk(Chunks(team.spec, 1, Gradient(team.spec, 1, 2))[0]);
  for (auto told = team.wires[0]->Read(); told && told->credit().acknowledged() == 0;) told = team.wires[0]->Read();
  const grpc::Status refused = Replace(team.spec, team.tokens[1], {{1, "weights", Ramp(team.spec, 1, 1)}});
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("between two steps, and step 2 of run 'r1' is open"));
  EXPECT_SOON(Status("r1").weights_loaded(), true);
}

TEST_F(StateRpcTest, ACallThatIsRefusedBeforeItsFirstChunkChangesNothing) {
  Team team = StartTeam(Spec(), 2);
  ExpectStep(&team, 1, 1, 0.5f);
  const grpc::Status refused = Replace(team.spec, team.tokens[0], {{1, "exp_avg", Ramp(team.spec, 1, 1)}});
  EXPECT_THAT(refused.error_message(), HasSubstr("the slot is 'exp_avg'"));
  EXPECT_SOON(Status("r1").weights_loaded(), true);
  ExpectStep(&team, 2, 1, 0.5f);
}

// The run says so, and makes no step, until another call has brought all that was begun.
TEST_F(StateRpcTest, AfterACallThatEndedHalfwayTheRunWaitsForAnotherOne) {
  Team team = StartTeam(Spec(), 1);
  ExpectStep(&team, 1, 1, 1);
  const std::vector<Slot> whole = Everything(&team, 0.25f, 1);
  const Slot wrong{1, "exp_avg", Ramp(team.spec, 1, 1)};
  EXPECT_THAT(Replace(team.spec, team.tokens[0], {whole[0], whole[1], wrong}).error_message(), HasSubstr("'exp_avg'"));
  EXPECT_SOON(Status("r1").weights_loaded(), false);
  Pulled pulled;
  const grpc::Status read = Pull(Request(kAll), &pulled);
  EXPECT_EQ(read.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(read.error_message(), HasSubstr("were replaced in part"));
  team.wires[0]->Begin(2);
  const grpc::Status ended = team.wires[0]->Finish();
  EXPECT_THAT(ended.error_message(), HasSubstr("were replaced in part"));
  const grpc::Status part = Replace(team.spec, team.tokens[0], {whole[4], whole[5], whole[6], whole[7]});
  EXPECT_EQ(part.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(part.error_message(), HasSubstr("tensor 'w'"));
  ASSERT_TRUE(Replace(team.spec, team.tokens[0], whole).ok());
  EXPECT_SOON(Status("r1").weights_loaded(), true);
  Rejoin(&team);
  for (uint64_t step = 2; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
}

TEST_F(StateRpcTest, ARewindMakesARunWholeThatWasReplacedInPart) {
  v1::RunSpec spec = Spec();
  spec.mutable_rewind()->set_snapshots(1);
  spec.mutable_rewind()->set_every(2);
  Team team = StartTeam(spec, 1);
  for (uint64_t step = 1; step <= 3; ++step) {
    SendStep(&team, step, {});
    ASSERT_TRUE(ReadStep(team.wires[0].get()).result);
    if (step <= 2) UpdateReference(&team, step, 1, 1);
  }
  const grpc::Status refused =
      Replace(team.spec, team.tokens[0], {{0, "weights", Ramp(team.spec, 0, 1)}, {1, "updates", {}, 9}});
  EXPECT_THAT(refused.error_message(), HasSubstr("'b' has state that was sent in part"));
  EXPECT_SOON(Status("r1").weights_loaded(), false);
  ASSERT_TRUE(RewindTo(2).ok());
  EXPECT_SOON(Status("r1").weights_loaded(), true);
  Rejoin(&team);
  for (uint64_t step = 3; step <= 4; ++step) ExpectStep(&team, step, 1, 1);
}

}  // namespace
}  // namespace ballast::testing
