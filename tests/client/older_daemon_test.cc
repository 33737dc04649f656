// What a daemon of an earlier version passes over, and the client does not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/client.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/quiet_client.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

TEST(OlderDaemonTest, AveragesThatItDoesNotKeepAreAskedForInVain) {
  FakeDaemon daemon;  // plans nothing
  const auto client = QuietClient(daemon.address());
  v1::RunSpec spec;
  spec.set_run_id("r");
  ASSERT_TRUE(client->CreateRun(spec).ok());
  spec.add_averages(0.9);
  const auto created = client->CreateRun(spec);
  EXPECT_TRUE(absl::IsFailedPrecondition(created.status()));
  EXPECT_THAT(std::string(created.status().message()),
              HasSubstr("is older than this client, and keeps no averages of weights for run 'r': update it"));
}

// It refuses what it does not know, and deletes a part alone, as it always has.
TEST(OlderDaemonTest, DeletesARunAlthoughItKnowsNothingOfPartsThere) {
  FakeDaemon daemon;
  daemon.RefuseDeleteRun({{grpc::StatusCode::INVALID_ARGUMENT, "the field 4 of DeleteRunRequest is not known here"}});
  ASSERT_TRUE(QuietClient(daemon.address())->DeleteRun("r", /*force=*/false).ok());
  const auto deletions = daemon.seen().deletions;
  ASSERT_EQ(deletions.size(), 2u);
  EXPECT_EQ(deletions[0].daemons(), 1u);
  EXPECT_EQ(deletions[1].daemons(), 0u);
  ASSERT_TRUE(QuietClient(daemon.address())->DeleteRun("r", /*force=*/true).ok());
  EXPECT_EQ(daemon.seen().deletions[2].daemons(), 0u);
}

}  // namespace
}  // namespace ballast
