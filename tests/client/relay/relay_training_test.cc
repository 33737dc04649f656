// Relays of real daemons, while a run trains: whatever level a reader is at, and whatever is cut, each version is what a
// Pull brings there where it trains, to the bit.
#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/client/cutting_proxy.h"
#include "tests/client/follow/followed_training.h"
#include "tests/client/relay/relay_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::DoubleNear;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::Optional;

constexpr char kReaders[] = "ballast_followers{run_id=\"least-squares\"}";

class RelayTrainingTest : public ::testing::TestWithParam<const char*> {
 protected:
  RealDaemon daemon_;
};

TEST_P(RelayTrainingTest, ATreeOfThreeServesWhatAPullBrings) {
  FollowedTraining training(daemon_.address(), GetParam());
  const RealDaemon middle(RelayOf(daemon_.address())), leaf(RelayOf(middle.address()));
  const auto above = Follow(middle.address()), reader = Follow(leaf.address());
  Reach(*above, 0);
  EXPECT_FALSE(Reach(*reader, 0).base_step);
  EXPECT_EQ(Here(*reader), training.Pulled());
  for (uint64_t step = 1; step <= 8; ++step) {
    training.Train(1);
    const FollowedVersion direct = Reach(*above, step), version = Reach(*reader, step);
    EXPECT_EQ(version.base_step, step - 1);
    EXPECT_EQ(version.received_bytes, direct.received_bytes) << "it passes as it came";
    EXPECT_EQ(version.closed_unix_s, direct.closed_unix_s);
    EXPECT_EQ(Here(*reader), training.Pulled()) << step;
    EXPECT_EQ(Here(*above), training.Pulled()) << step;
  }
  EXPECT_EQ(BareClient(leaf.address()).Listed(kRun).relay().relays_above(), 1u);
}

TEST_P(RelayTrainingTest, ARelayThatIsCutAgainAndAgainKeepsUp) {
  FollowedTraining training(daemon_.address(), GetParam());
  const CuttingProxy upper(daemon_.address(), {9'000, 20'000, 40'000, 30'000, 25'000, 50'000, 21'000, 33'000});
  const RealDaemon middle(RelayOf(upper.address()));
  const CuttingProxy lower(middle.address(), {11'000, 30'000, 10'000, 60'000, 35'000, 20'000, 41'000, 23'000});
  const RealDaemon leaf(RelayOf(lower.address()));
  const auto reader = Follow(leaf.address());
  for (uint64_t step = 1; step <= 12; ++step) {
    training.Train(1);
    Reach(*reader, step);
    EXPECT_EQ(Here(*reader), training.Pulled()) << step;
  }
  EXPECT_GE(upper.connections(), 8);
  EXPECT_GE(lower.connections(), 8);
}

TEST_P(RelayTrainingTest, ReadersGoBackWithTheRun) {
  FollowedTraining training(daemon_.address(), GetParam(), /*rewinds=*/true);
  const RealDaemon relay(RelayOf(daemon_.address()));
  training.Train(5);
  const auto reader = Follow(relay.address());
  Reach(*reader, 5);
  v1::RewindRequest request;
  request.set_run_id(kRun);
  request.set_to_step(4);
  ASSERT_TRUE(training.client->Rewind(request).ok());
  EXPECT_EQ(Reach(*reader, 4, /*generation=*/2).step, 4u);
  EXPECT_EQ(Here(*reader), training.Pulled());
}

// Reads with bare calls, so that it may say to one daemon what it has of another.
struct Wanderer {
  explicit Wanderer(const v1::GetRunResponse& run)
      : weights(FollowedWeights::Create(run.spec(), run.status().plan().chunk_elements()).value()) {}
  // Versions until that of this step; how many came as changes of what is here.
  int Read(const std::string& server, uint64_t step) {
    const BareClient client(server);
    grpc::ClientContext context;
    v1::SubscribeRequest request;
    request.set_run_id(kRun);
    if (have) *request.mutable_have() = *have;
    const auto call = client.follow->Subscribe(&context, request);
    int changes = 0;
    v1::VersionPart message;
    while ((!have || have->step() < step) && call->Read(&message)) {
      for (const v1::VersionPart& part : message.batch()) {
        if (part.has_begin() && part.begin().has_base()) {
          EXPECT_EQ(part.begin().base().SerializeAsString(), have->SerializeAsString());
          ++changes;
        }
        if (part.has_chunk()) {
          const absl::Status applied = weights.Apply(part.chunk());  // which compares digests
          EXPECT_TRUE(applied.ok()) << applied;
        }
        if (part.has_end()) have = part.end().id();
      }
    }
    EXPECT_TRUE(have && have->step() >= step);
    context.TryCancel();
    while (call->Read(&message)) continue;
    call->Finish();
    return changes;
  }
  FollowedWeights weights;
  std::optional<v1::VersionId> have;
};

TEST_P(RelayTrainingTest, AReaderGoesFromOneLevelToAnother) {
  FollowedTraining training(daemon_.address(), GetParam());
  const RealDaemon middle(RelayOf(daemon_.address())), leaf(RelayOf(middle.address()));
  const auto at_leaf = Follow(leaf.address());
  Reach(*at_leaf, 0);
  Wanderer wanderer(BareClient(leaf.address()).GetRun(kRun));
  EXPECT_EQ(wanderer.Read(leaf.address(), 0), 0);
  const std::string levels[] = {daemon_.address(), leaf.address(), middle.address(), daemon_.address(),
                                middle.address()};
  uint64_t step = 0;
  for (const std::string& server : levels) {
    training.Train(1);
    Reach(*at_leaf, ++step);
    EXPECT_EQ(wanderer.Read(server, step), 1) << server;
    for (uint32_t i = 0; i < 2; ++i) {
      const auto codes = at_leaf->Served(i)->codes;
      EXPECT_TRUE(std::equal(codes.begin(), codes.end(), wanderer.weights.codes(i).begin())) << i;
    }
  }
  // Ahead of a relay, it waits there.
  training.Train(1);
  EXPECT_EQ(wanderer.Read(daemon_.address(), ++step), 1);
  training.Train(1);
  EXPECT_EQ(wanderer.Read(leaf.address(), ++step), 1);
}

INSTANTIATE_TEST_SUITE_P(Servings, RelayTrainingTest, ::testing::Values("fp32", "bf16", "int8-row"),
                         [](const auto& test) { return InTestName(test.param); });

TEST(RelayDaemonTest, ManyReadersCostTheTrainersDaemonOne) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "int8-row");
  Config config = RelayOf(daemon.address());
  config.relay.readers = 66;
  const RealDaemon relay(config);
  std::vector<std::unique_ptr<Subscriber>> readers;
  for (int i = 0; i < 66; ++i) readers.push_back(Follow(relay.address()));
  for (const auto& reader : readers) Reach(*reader, 0);
  training.Train(3);
  const ServedBits weights = training.Pulled();
  for (const auto& reader : readers) {
    Reach(*reader, 3);
    EXPECT_EQ(Here(*reader), weights);
  }
  EXPECT_THAT(MetricOf(daemon, kReaders), Optional(1));
  EXPECT_THAT(MetricOf(relay, kReaders), Optional(66));
  const BareClient client(relay.address());
  grpc::ClientContext context;
  v1::SubscribeRequest request;
  request.set_run_id(kRun);
  const auto refused = client.follow->Subscribe(&context, request);
  v1::VersionPart part;
  EXPECT_FALSE(refused->Read(&part));
  const grpc::Status status = refused->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(),
              HasSubstr("66 readers follow run 'least-squares', as many as this relay takes (relay.readers)"));
}

TEST(RelayDaemonTest, ItShowsWhatItRelays) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "bf16");
  training.Train(2);
  const RealDaemon relay(RelayOf(daemon.address(), {kRun, "other"}));
  const auto reader = Follow(relay.address());
  Reach(*reader, 2);
  const BareClient client(relay.address()), there(daemon.address());
  v1::GetRunResponse run;
  EXPECT_SOON((run = client.GetRun(kRun), run.status().step()), Eq(2u));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(run.spec(), there.GetRun(kRun).spec()));
  EXPECT_EQ(run.spec_sha256(), there.GetRun(kRun).spec_sha256());
  EXPECT_EQ(run.status().state(), v1::RUN_STATE_RELAYED);
  EXPECT_EQ(run.status().follow().readers(), 1u);
  const v1::RelayStatus& shown = run.status().relay();
  EXPECT_EQ(shown.upstream(), daemon.address());
  EXPECT_TRUE(shown.connected());
  EXPECT_GT(shown.closed_unix_s(), 1e9);
  EXPECT_GT(shown.received_bytes(), 0u);
  EXPECT_EQ(run.status().bytes().following(), run.status().plan().server().following());
  EXPECT_SOON(client.Failure("other"), HasSubstr("other"));
  EXPECT_EQ((client.GetRun("other"), client.error.error_code()), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(client.error.error_message(), HasSubstr("run 'other' is relayed from " + daemon.address()));
  client.GetRun("third");
  EXPECT_THAT(client.error.error_message(), HasSubstr("is none of those that it relays (relay.runs)"));

  grpc::ClientContext context;
  v1::GetServerResponse server;
  ASSERT_TRUE(client.admin->GetServer(&context, {}, &server).ok());
  EXPECT_EQ(server.relay().upstream(), daemon.address());
  EXPECT_EQ(server.memory_reserved_bytes(), run.status().bytes().following());
  EXPECT_THAT(MetricOf(relay, "ballast_relay_connected{run_id=\"least-squares\"}"), Optional(1));
  EXPECT_THAT(MetricOf(relay, "ballast_relay_connected{run_id=\"other\"}"), Optional(0));
  EXPECT_THAT(MetricOf(relay, "ballast_relay_version_timestamp_seconds{run_id=\"least-squares\"}"),
              Optional(DoubleNear(shown.closed_unix_s(), 0.01)));
  EXPECT_THAT(MetricOf(relay, "ballast_version_step{run_id=\"least-squares\"}"), Optional(2));
}

TEST(RelayDaemonTest, NobodyTrainsThere) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  const RealDaemon relay(RelayOf(daemon.address()));
  const BareClient client(relay.address());
  const auto expect_refused = [&](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("this daemon is a relay of " + daemon.address()));
  };
  const auto call = [&](auto& stub, auto method, auto request, auto response) {
    grpc::ClientContext context;
    expect_refused((stub.*method)(&context, request, &response));
  };
  using Trainer = v1::TrainerService::Stub;
  using Admin = v1::AdminService::Stub;
  v1::CreateRunRequest create;
  *create.mutable_spec() = training.spec;
  call(*client.trainer, &Trainer::CreateRun, create, v1::CreateRunResponse());
  call(*client.trainer, &Trainer::AmendRun, v1::AmendRunRequest(), v1::AmendRunResponse());
  call(*client.trainer, &Trainer::Attach, v1::AttachRequest(), v1::AttachResponse());
  call(*client.admin, &Admin::DeleteRun, v1::DeleteRunRequest(), v1::DeleteRunResponse());
  call(*client.admin, &Admin::Rewind, v1::RewindRequest(), v1::RewindResponse());
  call(*client.admin, &Admin::Checkpoint, v1::CheckpointRequest(), v1::CheckpointResponse());
  call(*client.admin, &Admin::ListCheckpoints, v1::ListCheckpointsRequest(), v1::ListCheckpointsResponse());
  call(*client.admin, &Admin::Restore, v1::RestoreRequest(), v1::RestoreResponse());
  call(*client.admin, &Admin::GetHistory, v1::GetHistoryRequest(), v1::GetHistoryResponse());
  call(*client.admin, &Admin::Plan, v1::PlanRequest(), v1::PlanResponse());
  {
    grpc::ClientContext context;
    const auto pull = client.trainer->Pull(&context, {});
    v1::Weights weights;
    EXPECT_FALSE(pull->Read(&weights));
    expect_refused(pull->Finish());
  }
  {
    grpc::ClientContext context;
    const auto train = client.trainer->Train(&context);
    v1::TrainResponse response;
    EXPECT_FALSE(train->Read(&response));
    expect_refused(train->Finish());
  }
  grpc::ClientContext context;
  v1::LoadStateResponse response;
  const auto load = client.trainer->LoadState(&context, &response);
  load->WritesDone();
  expect_refused(load->Finish());
}

TEST(RelayDaemonTest, ARunThatDoesNotFitIsRefusedAndOthersAreServed) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  const auto client = Client::Connect({.server = daemon.address()}).value();
  v1::RunSpec large = LeastSquares::Spec();
  large.set_run_id("large");
  large.mutable_follow();
  large.mutable_tensors(0)->set_shape(0, 96 * 20);
  ASSERT_TRUE(client->CreateRun(large).ok());
  Config config = RelayOf(daemon.address(), {"large", kRun});
  config.relay.readers = 1;
  config.memory_limit = 2 << 20;
  const RealDaemon relay(config);
  Reach(*Follow(relay.address()), 0);
  const BareClient bare(relay.address());
  EXPECT_SOON(bare.Failure("large"), HasSubstr("this relay has no room for run 'large'"));
  const std::string why = bare.Failure("large");
  EXPECT_THAT(why, ::testing::ContainsRegex("take [0-9]+ bytes, and [0-9]+ of memory_limit are free"));
  bare.GetRun("large");
  EXPECT_EQ(bare.error.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_GE(MetricOf(relay, "ballast_relay_failures_total{reason=\"memory\",run_id=\"large\"}").value_or(0), 1);
}

TEST(RelayDaemonTest, ARunsEndIsItsReadersEndUntilThereIsOneAgain) {
  RealDaemon daemon;
  auto training = std::make_unique<FollowedTraining>(daemon.address());
  const RealDaemon relay(RelayOf(daemon.address()));
  const auto reader = Follow(relay.address());
  Reach(*reader, 0);
  ASSERT_TRUE(training->client->DeleteRun(kRun, /*force=*/true).ok());
  const absl::Status gone = reader->Next(kSoonS).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
  const BareClient client(relay.address());
  EXPECT_EQ(client.Listed(kRun).bytes().following(), 0u);
  training = std::make_unique<FollowedTraining>(daemon.address());
  EXPECT_SOON((client.GetRun(kRun), client.error.ok()), Eq(true));
  const auto other = Follow(relay.address());
  training->Train(1);
  Reach(*other, 1);
  EXPECT_EQ(Here(*other), training->Pulled());
}

TEST(RelayDaemonTest, AReaderOfARunThatIsAmendedGetsItsNewTensors) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  const RealDaemon middle(RelayOf(daemon.address())), leaf(RelayOf(middle.address()));
  const auto reader = Follow(leaf.address());
  Reach(*reader, 0);
  v1::TensorSpec* added = training.spec.add_tensors();
  added->set_name("extra");
  added->set_dtype("fp32");
  added->add_shape(5);
  ASSERT_TRUE(training.client->AmendRun(training.spec).ok());
  ASSERT_TRUE(training.client->Attach({.run_id = kRun}).ok());
  const std::vector<float> extra = {1, 2, 3, 4, 5};
  const TensorView view{.tensor = 2,
                        .format = "fp32",
                        .bytes = {reinterpret_cast<const std::byte*>(extra.data()), extra.size() * sizeof(float)}};
  ASSERT_TRUE(training.client->LoadWeights({&view, 1}, /*replace=*/true).ok());
  FollowedVersion version;
  while (!version.respecified) version = Reach(*reader, 0);
  std::vector<float> got(5);
  while (got != extra) {
    ASSERT_TRUE(reader->Read(2, absl::MakeSpan(reinterpret_cast<std::byte*>(got.data()), 20)).ok());
    if (got != extra) Reach(*reader, 0);
  }
}

TEST(RelayDaemonTest, AMiddleThatIsStartedAnewIsNoLoss) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  auto middle = std::make_unique<RealDaemon>(RelayOf(daemon.address()));
  Config again = RelayOf(daemon.address());
  again.listen = middle->address();
  const RealDaemon leaf(RelayOf(middle->address()));
  const auto reader = Follow(leaf.address());
  Reach(*reader, 0);
  middle.reset();
  training.Train(3);
  const BareClient client(leaf.address());
  EXPECT_SOON(client.Listed(kRun).relay().connected(), Eq(false));
  EXPECT_EQ(client.Listed(kRun).step(), 0u) << "what there is, is served on";
  Reach(*Follow(leaf.address()), 0);
  middle = std::make_unique<RealDaemon>(again);
  Reach(*reader, 3);
  EXPECT_EQ(Here(*reader), training.Pulled());
}

// Sockets whose names are known before anybody listens there.
class RelayCircleTest : public ::testing::Test {
 protected:
  RelayCircleTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "ballast_relays_XXXXXX").string();
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  ~RelayCircleTest() override { std::filesystem::remove_all(folder_); }
  Config At(const std::string& own, const std::string& upstream) const {
    Config config = RelayOf(absl::StrCat("unix:", folder_, "/", upstream), {"r"});
    config.listen = absl::StrCat("unix:", folder_, "/", own);
    return config;
  }
  static bool FindsCircle(const RealDaemon& relay) {
    return Soon([client = BareClient(relay.address())] {
      return absl::StrContains(client.Failure("r"), "no daemon in this circle trains") &&
             (client.GetRun("r"), client.error.error_code()) == grpc::StatusCode::FAILED_PRECONDITION;
    });
  }
  std::string folder_;
};

TEST_F(RelayCircleTest, OneThatFollowsItselfSaysSo) {
  const RealDaemon relay(At("a", "a"));
  EXPECT_TRUE(FindsCircle(relay));
  EXPECT_GE(MetricOf(relay, "ballast_relay_failures_total{reason=\"circle\",run_id=\"r\"}").value_or(0), 1);
}

TEST_F(RelayCircleTest, ThreeThatFollowEachOtherSaySo) {
  const RealDaemon a(At("a", "b")), b(At("b", "c")), c(At("c", "a"));
  EXPECT_TRUE(FindsCircle(a));
  EXPECT_TRUE(FindsCircle(b));
  EXPECT_TRUE(FindsCircle(c));
}

}  // namespace
}  // namespace ballast
