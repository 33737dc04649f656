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

}  // namespace
}  // namespace ballast
