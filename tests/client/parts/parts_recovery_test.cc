// Daemons of one run that come apart: a rank that is lost between them, one that was rewound, one that has lost its part.
// They come together again, or it is said why not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "proto/rewound.h"

#include "client/cpp/parts/part_placement.h"
#include "tests/client/parts/parts_team.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr double kLeaseS = 0.2;

Config Impatient() {
  Config config = RealDaemon::Small();
  config.limits.lease_s = kLeaseS;
  return config;
}

Training TwoRanks(bool staged) {
  Training training{.spec = DozenTensors(), .world = 2};
  training.spec.set_ranks(2);
  training.spec.set_rank_timeout_s(0.1);
  if (staged) training.spec.set_commit(v1::COMMIT_MODE_STAGED);
  return training;
}

// A rank trains to step `last` and leaves.
void TrainAndLeave(const Daemons& daemons, const Training& training, int last) {
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, last);
}

// Rank 1 by a client of its own on each daemon, so that it can be lost between them.
class TornRank {
 public:
  TornRank(const Daemons& daemons, size_t count, const Training& training)
      : placement_(PartPlacement::Of(training.spec, static_cast<uint32_t>(count)).value()) {
    for (size_t part = 0; part < count; ++part) {
      clients_.push_back(OpenClient(daemons[part].address()));
      const auto attached =
          clients_[part]->Attach({.run_id = training.spec.run_id(), .rank = 1, .world = training.world});
      EXPECT_TRUE(attached.ok()) << attached.status();
      EXPECT_EQ(clients_[part]->BeginStep({.groups = {{.lr = 0.01}}}), absl::OkStatus());
    }
    for (const v1::TensorSpec& tensor : training.spec.tensors()) {
      size_t elements = 1;
      for (const int64_t size : tensor.shape()) elements *= static_cast<size_t>(size);
      sizes_.push_back(elements);
    }
  }

  void PushAll(size_t part) {
    for (uint32_t i = 0; i < placement_.numbers(static_cast<uint32_t>(part)).size(); ++i) {
      const std::vector<float> gradient(sizes_[placement_.numbers(static_cast<uint32_t>(part))[i]], 0.5f);
      const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(gradient.data()),
                                              gradient.size() * sizeof(float));
      EXPECT_EQ(clients_[part]->Push(i, bytes), absl::OkStatus());
    }
  }
  Client& operator[](size_t part) { return *clients_[part]; }
  // Its process is gone.
  void Die() { clients_.clear(); }

 private:
  const PartPlacement placement_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<size_t> sizes_;  // by tensor of the run
};

// The last rank to end a step on one of the daemons goes, and has not begun it on the other: the next process of it makes
// the next step, and the one before is PARTIAL for the others.
TEST(PartsRecoveryTest, ARankThatIsLostBetweenDaemonsLeavesAPartialStep) {
  Training training = TwoRanks(/*staged=*/false);
  training.spec.set_rank_timeout_s(600);
  Daemons daemons(2, Impatient());
  PartsRank first(daemons.addresses(), training, 0);
  ASSERT_EQ(first.Join(), absl::OkStatus());
  auto torn = std::make_unique<TornRank>(daemons, 2, training);
  torn->PushAll(0);
  std::thread trains([&] {
    const auto result = first.Step(1);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_PARTIAL);
    EXPECT_EQ(result->result.reason(), "restarted");
    EXPECT_THAT(result->result.detail(), HasSubstr("goes on with step 2"));
    EXPECT_FALSE(result->result.tensors_not_applied().empty());
    EXPECT_FALSE(result->received.empty());
    EXPECT_EQ(result->received.size() + static_cast<size_t>(result->result.tensors_not_applied_size()), 12u);
  });
  const auto on_one = (*torn)[0].EndStep(1.0).get();
  ASSERT_TRUE(on_one.ok()) << on_one.status();
  torn->Die();
  PartsRank second(daemons.addresses(), training, 1);
  const auto attached = second.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 2u);
  trains.join();
  std::thread goes_on([&] { EXPECT_TRUE(first.Step(2).ok()); });
  const auto result = second.Step(2);
  goes_on.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_APPLIED);
}

// It has sent all of a staged step, and is gone before it has brought the verdict: the other rank brings it.
TEST(PartsRecoveryTest, ARankThatIsLostBeforeTheVerdictIsNotMissed) {
  const Training training = TwoRanks(/*staged=*/true);
  Daemons daemons(2, Impatient());
  PartsRank first(daemons.addresses(), training, 0);
  ASSERT_EQ(first.Join(), absl::OkStatus());
  TornRank torn(daemons, 2, training);
  std::vector<std::future<absl::StatusOr<MeasuredStep>>> measured;
  for (const size_t part : {0u, 1u}) {
    torn.PushAll(part);
    measured.push_back(torn[part].MeasureStep(1.0));
  }
  std::thread gone([&] {
    for (auto& one : measured) EXPECT_TRUE(one.get().ok());
    torn.Die();
  });
  const auto result = first.Step(1);
  gone.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_APPLIED) << result->result.DebugString();
  EXPECT_EQ(result->received.size(), 12u);
}

// It is lost before one daemon has measured: nothing is applied on either.
TEST(PartsRecoveryTest, ARankThatIsLostBeforeOneDaemonHasMeasuredLeavesAllAsItWas) {
  const Training training = TwoRanks(/*staged=*/true);
  Daemons daemons(2, Impatient());
  PartsRank first(daemons.addresses(), training, 0);
  ASSERT_EQ(first.Join(), absl::OkStatus());
  TornRank torn(daemons, 2, training);
  torn.PushAll(0);
  auto measured = torn[0].MeasureStep(1.0);
  std::thread gone([&] {
    EXPECT_TRUE(measured.get().ok());
    torn.Die();
  });
  const auto result = first.Step(1);
  gone.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_ABORTED) << result->result.DebugString();
  EXPECT_EQ(result->result.reason(), "rank_lost");
  EXPECT_TRUE(result->received.empty());
}

// By an operator who names one daemon alone.
void RewindOne(RealDaemon& daemon, uint64_t to_step) {
  v1::RewindRequest request;
  request.set_run_id("dozen");
  request.set_to_step(to_step);
  ASSERT_TRUE(OpenClient(daemon.address())->Rewind(request).ok());
}

Training WithSnapshots() {
  Training training{.spec = DozenTensors(), .steps = 12};
  training.spec.mutable_rewind()->set_snapshots(3);
  training.spec.mutable_rewind()->set_every(2);
  return training;
}

TEST(PartsRecoveryTest, WhenOneDaemonWasRewoundAllGoBackToItsStep) {
  const Training training = WithSnapshots();
  Daemons daemons(3);
  const std::vector<SeenSteps> wanted = Train(Daemons(1).addresses(), training);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 7);
  RewindOne(daemons[1], 4);
  const auto lost = rank.Step(8);
  ASSERT_EQ(RewoundTo(lost.status()), 4u) << lost.status();
  const auto attached = rank.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 5u);
  EXPECT_EQ(attached->client_state, "rank 0 step 4");
  rank.Train(5, 12);
  rank.PullState();
  EXPECT_TRUE(rank.seen().state == wanted[0].state);
}

TEST(PartsRecoveryTest, ARewindIsOfAllDaemons) {
  const Training training = WithSnapshots();
  Daemons daemons(3);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 7);
  v1::RewindRequest request;
  request.set_run_id("dozen");
  request.set_steps_back(2);
  const auto rewound = rank.client().Rewind(request);
  ASSERT_TRUE(rewound.ok()) << rewound.status();
  EXPECT_EQ(rewound->step(), 4u);
  EXPECT_EQ(RewoundTo(rank.client().status()), 4u);
  const auto attached = rank.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 5u);
  request.set_to_step(3);
  EXPECT_THAT(std::string(rank.client().Rewind(request).status().message()), HasSubstr("of steps 2, 4"));
}

// One step apart: what only one of them has made is torn, and its number is used up.
TEST(PartsRecoveryTest, AStepThatOneDaemonHasNotMadeIsTorn) {
  Training training = WithSnapshots();
  training.spec.mutable_rewind()->set_snapshots(1);
  Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 3);
  RewindOne(daemons[1], 2);
  while (!RewoundTo(rank.client().status())) std::this_thread::yield();  // else daemon 0 might make step 4
  const auto attached = rank.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 4u);
  EXPECT_EQ(attached->last_result->outcome(), v1::STEP_OUTCOME_PARTIAL);
  rank.Train(4, 7);
}

TEST(PartsRecoveryTest, ATornStepIsUndoneWhereTheRunSaysSo) {
  Training training = WithSnapshots();
  training.spec.set_on_torn(v1::TORN_POLICY_REWIND);
  Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 3);
  RewindOne(daemons[1], 2);
  ASSERT_TRUE(RewoundTo(rank.Step(4).status()));
  const auto attached = rank.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 3u);
}

// Rank 1 comes back first, and has the step close where it was not made.
TEST(PartsRecoveryTest, ATornStepIsUndoneByRank0WhenItComesBackLast) {
  Training training = WithSnapshots();
  training.world = 2;
  training.spec.set_ranks(2);
  training.spec.set_rank_timeout_s(0.1);
  training.spec.set_on_torn(v1::TORN_POLICY_REWIND);
  Daemons daemons(2, Impatient());
  {
    PartsRank first(daemons.addresses(), training, 0), second(daemons.addresses(), training, 1);
    ASSERT_EQ(first.Join(), absl::OkStatus());
    ASSERT_EQ(second.Join(), absl::OkStatus());
    std::thread trains([&] { second.Train(1, 3); });
    first.Train(1, 3);
    trains.join();
  }
  RewindOne(daemons[1], 2);
  PartsRank second(daemons.addresses(), training, 1), first(daemons.addresses(), training, 0);
  ASSERT_TRUE(second.Attach().ok());
  const auto attached = first.Attach();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->resume_step, 3u);
}

TEST(PartsRecoveryTest, WhereNoStepIsOnAllDaemonsEachIsNamed) {
  const Training training{.spec = DozenTensors(), .steps = 3};
  Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 3);
  // The one forgets its part, and somebody makes it anew there.
  const auto other = OpenClient(daemons[1].address());
  const v1::RunSpec part = PartPlacement::Of(training.spec, 2)->Split(training.spec)[1];
  ASSERT_TRUE(other->DeleteRun("dozen", /*force=*/true).ok());
  ASSERT_TRUE(other->CreateRun(part).ok());
  PartsRank again(daemons.addresses(), training, 0);
  const absl::Status refused = again.Attach(/*takeover=*/true).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(daemons[0].address() + " has 3; "));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(daemons[1].address() + " has none"));
}

TEST(PartsRecoveryTest, ADaemonThatHasLostItsPartIsNamed) {
  const Training training{.spec = DozenTensors(), .steps = 2};
  Daemons daemons(2);
  ASSERT_NO_FATAL_FAILURE(TrainAndLeave(daemons, training, 2));
  ASSERT_TRUE(OpenClient(daemons[1].address())->DeleteRun("dozen", /*force=*/true).ok());
  PartsRank rank(daemons.addresses(), training, 0);
  const absl::Status joined = rank.Join();
  EXPECT_TRUE(absl::IsFailedPrecondition(joined)) << joined;
  EXPECT_THAT(std::string(joined.message()),
              HasSubstr("the daemon at " + daemons[1].address() + " does not have its part of run 'dozen' any more"));
  EXPECT_TRUE(OpenClient(daemons[1].address())->ListRuns()->runs().empty()) << "what was made there is left";
}

TEST(PartsRecoveryTest, ARunThatHasLostAPartIsNotShownAsWhole) {
  const Training training{.spec = DozenTensors(), .steps = 2};
  Daemons daemons(2);
  ASSERT_NO_FATAL_FAILURE(TrainAndLeave(daemons, training, 2));
  const auto all = OpenClient(daemons.addresses());
  EXPECT_EQ(all->ListRuns()->runs(0).parts(), 0u) << "it is the whole run";
  EXPECT_EQ(OpenClient(daemons[0].address())->ListRuns()->runs(0).parts(), 2u);
  ASSERT_TRUE(OpenClient(daemons[1].address())->DeleteRun("dozen", /*force=*/true).ok());
  const auto runs = all->ListRuns();
  ASSERT_TRUE(runs.ok()) << runs.status();
  ASSERT_EQ(runs->runs_size(), 1);
  EXPECT_EQ(runs->runs(0).state(), v1::RUN_STATE_FAILED);
  const std::string lacks = "the daemon at " + daemons[1].address() + " does not have its part of run 'dozen'";
  EXPECT_THAT(runs->runs(0).failure(), HasSubstr(lacks));
  const absl::Status run = all->GetRun("dozen").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(run)) << run;
  EXPECT_THAT(std::string(run.message()), HasSubstr(lacks));
}

TEST(PartsRecoveryTest, DaemonsThatAreAtDifferentStepsAreToldWhileNobodyTrains) {
  const Training training = WithSnapshots();
  Daemons daemons(2);
  const auto all = OpenClient(daemons.addresses());
  ASSERT_NO_FATAL_FAILURE(TrainAndLeave(daemons, training, 7));
  EXPECT_EQ(all->GetRun("dozen")->status().failure(), "");
  RewindOne(daemons[1], 4);
  const v1::RunStatus status = all->GetRun("dozen")->status();
  EXPECT_EQ(status.step(), 4u);
  EXPECT_THAT(status.failure(), HasSubstr(daemons[0].address() + " at 7, " + daemons[1].address() + " at 4"));
}

TEST(PartsRecoveryTest, APartIsDeletedAloneByForceAndTheRestByAllDaemons) {
  const Training training{.spec = DozenTensors(), .steps = 2};
  Daemons daemons(2);
  ASSERT_NO_FATAL_FAILURE(TrainAndLeave(daemons, training, 2));
  const auto alone = OpenClient(daemons[1].address()), all = OpenClient(daemons.addresses());
  const absl::Status refused = alone->DeleteRun("dozen", /*force=*/false).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("this daemon has part 1 of 2 of run 'dozen'"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("name all daemons of the run, as its trainers do, or delete"));
  EXPECT_TRUE(all->GetRun("dozen").ok());
  ASSERT_TRUE(alone->DeleteRun("dozen", /*force=*/true).ok());
  EXPECT_TRUE(all->DeleteRun("dozen", /*force=*/false).ok());
  EXPECT_TRUE(OpenClient(daemons[0].address())->ListRuns()->runs().empty());
}

TEST(PartsRecoveryTest, OtherListsOfDaemonsAreRefused) {
  const Training training{.spec = DozenTensors(), .steps = 2};
  Daemons daemons(3);
  const std::string a = daemons[0].address(), b = daemons[1].address(), c = daemons[2].address();
  PartsRank rank(a + "," + b, training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  const auto said = [](const std::string& server) {
    return std::string(OpenClient(server)->GetRun("dozen").status().message());
  };
  EXPECT_THAT(said(b + "," + a), HasSubstr("in the same order"));
  EXPECT_THAT(said(a + "," + c), HasSubstr(c));
  const auto connect = [](const std::string& server) {
    return std::string(Client::Connect({.server = server}).status().message());
  };
  EXPECT_THAT(connect(a + "," + a), HasSubstr("named twice"));
  EXPECT_THAT(connect(a + ",," + b), HasSubstr("is empty"));
  EXPECT_THAT(std::string(OpenClient(a)->CreateRun(DozenTensors()).status().message()),
              HasSubstr("part is 0 of 2, asked for is the whole run"));
  v1::RunSpec spec = DozenTensors();
  spec.set_run_id("other");
  spec.set_on_lost_rank(v1::LOST_RANK_POLICY_CONTINUE);
  EXPECT_THAT(std::string(OpenClient(a + "," + b)->CreateRun(spec).status().message()),
              HasSubstr("on_lost_rank is LOST_RANK_POLICY_CONTINUE, and the run is on several daemons"));
  spec.mutable_tensors()->DeleteSubrange(1, 11);
  EXPECT_THAT(std::string(OpenClient(a + "," + b)->CreateRun(spec).status().message()), HasSubstr("name fewer"));
}

}  // namespace
}  // namespace ballast
