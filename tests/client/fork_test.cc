// A process with clients that is forked: the fork has them, but not their threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/fake_daemon.h"
#include "tests/client/follow/reader.h"
#include "tests/client/in_fork.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::IsEmpty;

bool IsRefused(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && status.message().find("fork") != std::string::npos;
}

bool RefusesSteps(Client& client) {
  const std::string gradient(16, 'x');
  return IsRefused(client.status()) && IsRefused(client.BindWeights(1, nullptr, 0)) &&
         IsRefused(client.BeginStep({})) && IsRefused(client.Push(1, BytesOf(gradient))) &&
         IsRefused(client.EndMicro({})) && IsRefused(client.MeasureStep({}).get().status()) &&
         IsRefused(client.EndStep({}).get().status()) && IsRefused(client.AwaitWeights(1, 0).status());
}

bool RefusesCalls(Client& client) {
  const auto sink = [](uint32_t, uint64_t, absl::Span<const std::byte>, uint64_t) { return absl::OkStatus(); };
  return IsRefused(client.CreateRun(FakeSpec()).status()) && IsRefused(client.GetRun("r").status()) &&
         IsRefused(client.Attach({.run_id = "r"}).status()) && IsRefused(client.LoadWeights({}).status()) &&
         IsRefused(client.Pull("r", {}, sink));
}

TEST(ForkTest, AForkIsRefusedEachCallAndItsEndLeavesTheParentsStepAlone) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(1).ok());
  EXPECT_TRUE(HoldsInFork([&] {
    const bool refused = RefusesSteps(*trainer.client) && RefusesCalls(*trainer.client);
    trainer.client->Detach();
    trainer.client.reset();
    return refused;
  }));
  const auto result = trainer.client->EndStep({}).get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(trainer.weights[1], Updated(trainer.Gradient(1, 2), 2));
  EXPECT_THAT(trainer.Lines(), IsEmpty());  // no connection was lost
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
}

TEST(ForkTest, AForkFollowsNothingAndItsEndLeavesTheParentsReaderAlone) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  const FollowedRun first(kFollowedSpec, 1);
  const FollowedRun second = first.Next();
  daemon.Say(first.Whole());
  reader.Next();
  EXPECT_TRUE(HoldsInFork([&] {
    std::string tensor(40, '?');
    const auto out = absl::MakeSpan(reinterpret_cast<std::byte*>(tensor.data()), tensor.size());
    const bool refused = reader.subscriber->Await(kLongS) && IsRefused(reader.subscriber->Next(kLongS).status()) &&
                         IsRefused(reader.subscriber->Read(0, out)) && IsRefused(reader.subscriber->Rollback("best"));
    reader.subscriber->Close();
    reader.subscriber.reset();
    return refused;
  }));
  daemon.Say(second.ChangesOf(first));
  EXPECT_EQ(reader.Next().step, second.step);
  reader.Expect(second);
  EXPECT_THAT(reader.Lines(), IsEmpty());
}

TEST(ForkTest, AForkOfAProcessWithAClientCannotConnect) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  EXPECT_TRUE(HoldsInFork([&] { return IsRefused(Client::Connect({.server = daemon.address()}).status()); }));
}

}  // namespace
}  // namespace ballast
