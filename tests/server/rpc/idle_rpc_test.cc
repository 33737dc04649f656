// Runs that no trainer is attached to: what is shown of them, and when they are deleted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "tests/eventually.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kNever = 0;

class IdleRpcTest : public RpcTest {
 protected:
  void Start(double idle_run_timeout_s, uint32_t max_runs = 16) {
    Config config = DefaultConfig();
    config.idle_run_timeout_s = idle_run_timeout_s;
    config.max_runs = max_runs;
    StartServer(config);
  }
  static v1::RunSpec SpecOf(const std::string& run_id) {
    v1::RunSpec spec = SmallSpec();
    spec.set_run_id(run_id);
    return spec;
  }
  // The trainer leaves as one does that closes.
  static void Leave(Trainer* trainer) {
    trainer->wire->CloseInput();
    EXPECT_TRUE(trainer->wire->Finish().ok());
  }
  std::vector<std::string> Runs() {
    grpc::ClientContext context;
    v1::ListRunsResponse list;
    EXPECT_TRUE(admin_->ListRuns(&context, {}, &list).ok());
    std::vector<std::string> names;
    for (const v1::RunStatus& run : list.runs()) names.push_back(run.run_id());
    return names;
  }
};

TEST_F(IdleRpcTest, ARunThatItsTrainerHasLeftIsFinishedUntilTheNextOneComes) {
  Start(kNever);
  Trainer t = StartTrainer(SmallSpec());
  EXPECT_FALSE(Status("r1").has_idle_seconds());
  Step(&t, 1);
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_TRAINING);
  Leave(&t);
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_FINISHED));
  EXPECT_SOON(Status("r1").has_idle_seconds(), Eq(true));
  EXPECT_TRUE(Status("r1").has_since_step_seconds());
  EXPECT_THAT(metrics_.Serialize(), AllOf(HasSubstr("ballast_run_state{run_id=\"r1\",state=\"finished\"} 1"),
                                          HasSubstr("ballast_run_state{run_id=\"r1\",state=\"training\"} 0"),
                                          HasSubstr("ballast_run_ranks_lost{run_id=\"r1\"} 0"),
                                          HasSubstr("ballast_runs{state=\"finished\"} 1")));
  AttachFresh("r1");
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_TRAINING);
  EXPECT_FALSE(Status("r1").has_idle_seconds());
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_run_state{run_id=\"r1\",state=\"training\"} 1"));
}

TEST_F(IdleRpcTest, ARewindLosesNoTrainerThatHadLeft) {
  Start(kNever);
  v1::RunSpec spec = SmallSpec();
  spec.mutable_rewind()->set_snapshots(4);
  spec.mutable_rewind()->set_every(1);
  Trainer t = StartTrainer(spec);
  for (uint64_t step = 1; step <= 3; ++step) Step(&t, step);
  Leave(&t);
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_FINISHED));
  ASSERT_TRUE(RewindTo(2).ok());
  EXPECT_SOON(Status("r1").rewinds(), Eq(1u));
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_FINISHED);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_run_ranks_lost{run_id=\"r1\"} 0"));
}

TEST_F(IdleRpcTest, AnAmendedRunIsShownAsItIs) {
  Config config = DefaultConfig();
  config.limits.lease_s = 0.1;
  StartServer(config);
  Trainer t = StartTrainer(SmallSpec());
  for (uint64_t step = 1; step <= 3; ++step) Step(&t, step);
  v1::RunSpec amended = SmallSpec();
  amended.mutable_groups(0)->mutable_hyper()->insert({"weight_decay", 0.25});
  ASSERT_TRUE(Amend(t.token, amended).ok());
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_WAITING));
  EXPECT_SOON(metrics_.Serialize(), AllOf(HasSubstr("ballast_run_ranks_lost{run_id=\"r1\"} 1"),
                                          HasSubstr("ballast_run_state{run_id=\"r1\",state=\"waiting\"} 1"),
                                          HasSubstr("ballast_step_stall_threshold_seconds{run_id=\"r1\"} 30\n")))
      << "and it remembers its pace";
}

TEST_F(IdleRpcTest, ARunWhoseTrainerWasLostWaitsForIt) {
  Config config = DefaultConfig();
  config.limits.lease_s = 0.1;
  StartServer(config);
  Trainer t = StartTrainer(SmallSpec());
  Step(&t, 1);
  t.wire->Hang();
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_WAITING));
  EXPECT_SOON(metrics_.Serialize(), AllOf(HasSubstr("ballast_run_ranks_lost{run_id=\"r1\"} 1"),
                                          HasSubstr("ballast_run_state{run_id=\"r1\",state=\"waiting\"} 1")));
  AttachFresh("r1");
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_TRAINING));
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("ballast_run_ranks_lost{run_id=\"r1\"} 0"));
}

TEST_F(IdleRpcTest, AnOpenStepIsShownWithTheTimeItWasBegunAt) {
  Start(kNever);
  Trainer t = StartTrainer(SmallSpec());
  const std::string none = "ballast_step_open_timestamp_seconds{run_id=\"r1\"} 0\n";
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(none));
  t.wire->Begin(1);
  EXPECT_SOON(metrics_.Serialize(), Not(HasSubstr(none)));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_step_stall_threshold_seconds{run_id=\"r1\"} 600\n"));
}

TEST_F(IdleRpcTest, ARunThatNobodyHasComeToWaitsAndIsCounted) {
  Start(kNever);
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_WAITING);
  EXPECT_TRUE(Status("r1").has_idle_seconds());
}

TEST_F(IdleRpcTest, OneRunTooManyIsToldWhichHaveNoTrainer) {
  Start(kNever, 2);
  Trainer t = StartTrainer(SmallSpec());
  ASSERT_TRUE(CreateRun(SpecOf("over")).ok());
  const std::string refused(CreateRun(SpecOf("more")).status().message());
  EXPECT_THAT(refused, AllOf(ContainsRegex("max_runs is 2; without a trainer: 'over' for [0-9]+s; delete one "
                                           "\\(`ballastctl delete RUN`\\), raise"),
                             HasSubstr("BALLAST_MAX_RUNS"), HasSubstr("idle_run_timeout"), Not(HasSubstr("'r1'"))));
}

TEST_F(IdleRpcTest, ARunWhoseMetricsHaveNoRoomIsToldWhichHaveNoTrainer) {
  Start(kNever, 1000);
  absl::Status refused;
  for (int i = 0; refused.ok() && i < 1000; ++i) refused = CreateRun(SpecOf(absl::StrCat("run-", i))).status();
  EXPECT_THAT(std::string(refused.message()),
              AllOf(ContainsRegex("metric series, [0-9]+ of 16000 free; without a trainer: 'run-0' for [0-9]+s, "),
                    HasSubstr("delete one (`ballastctl delete RUN`), lower limits.layer_groups "),
                    HasSubstr("BALLAST_LIMITS_LAYER_GROUPS"), HasSubstr("idle_run_timeout")));
}

TEST_F(IdleRpcTest, WhereAllRunsHaveATrainerThatIsSaid) {
  Start(kNever, 1);
  Trainer t = StartTrainer(SmallSpec());
  EXPECT_THAT(std::string(CreateRun(SpecOf("more")).status().message()), HasSubstr("all have a trainer"));
}

TEST_F(IdleRpcTest, ARunIsDeletedWhenNoTrainerHasComeForTheTimeout) {
  Start(3);
  Trainer t = StartTrainer(SmallSpec());
  ASSERT_TRUE(CreateRun(SpecOf("over")).ok());
  EXPECT_SOON(Runs(), ElementsAre("r1"));
  Step(&t, 1);  // whoever is attached stays, however long it is silent
  Leave(&t);
  EXPECT_SOON(Runs(), IsEmpty());
  ASSERT_TRUE(CreateRun(SmallSpec()).ok()) << "its name is free";
}

}  // namespace
}  // namespace ballast::testing
