// The keys of a relay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "server/config/config.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<CommandLine> Parse(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"--relay.upstream=top:7700", "--relay.runs=a,b"});
  return ParseCommandLine(flags, {});
}

void ExpectRefused(const std::vector<std::string>& flags, const std::string& what) {
  const auto line = Parse(flags);
  ASSERT_FALSE(line.ok()) << what;
  EXPECT_THAT(std::string(line.status().message()), HasSubstr(what));
}

TEST(RelayConfigTest, ARelayNamesItsUpstreamAndItsRuns) {
  const auto line = Parse({"--relay.readers=200"});
  ASSERT_TRUE(line.ok()) << line.status();
  const Config::Relay& relay = line->config.relay;
  EXPECT_TRUE(relay.on());
  EXPECT_EQ(relay.upstream, "top:7700");
  EXPECT_THAT(relay.runs, ::testing::ElementsAre("a", "b"));
  EXPECT_EQ(relay.readers, 200u);
  EXPECT_FALSE(ParseCommandLine({}, {})->config.relay.on());
  EXPECT_TRUE(Parse({"--relay.upstream=unix:/run/ballast/grpc", "--relay.token_file=/t"}).ok());
  EXPECT_TRUE(Parse({"--relay.ca=/ca", "--relay.certificate=/c", "--relay.key=/k", "--relay.token_file=/t"}).ok());
}

TEST(RelayConfigTest, WhatDoesNotGoTogetherIsRefused) {
  ExpectRefused({"--relay.upstream=top"}, "top");
  ExpectRefused({"--relay.upstream=top:0"}, "has port 0");
  ExpectRefused({"--relay.upstream=unix:grpc"}, "is no unix:/PATH");
  ExpectRefused({"--storage.dir=/data"}, "a relay keeps nothing on the disk");
  ExpectRefused({"--device=cuda:0"}, "a relay computes nothing");
  ExpectRefused({"--relay.runs="}, "name the runs that the relay is to follow");
  ExpectRefused({"--relay.runs=a,b,a"}, "names 'a' twice");
  ExpectRefused({"--max_runs=1"}, "names 2 runs, and max_runs is 1");
  ExpectRefused({"--relay.readers=2000"}, "out of range");
  ExpectRefused({"--relay.ca=ca.crt"}, "no absolute path");
  ExpectRefused({"--relay.certificate=/c"}, "wants relay.ca");
  ExpectRefused({"--relay.ca=/ca", "--relay.certificate=/c"}, "wants relay.key");
  ExpectRefused({"--relay.ca=/ca", "--relay.key=/k"}, "wants relay.certificate");
  ExpectRefused({"--relay.token_file=/t"}, "tokens are sent over TLS or a Unix socket alone");
  for (const std::string flag : {"--relay.runs=a", "--relay.ca=/ca", "--relay.token_file=/t"}) {
    const auto line = ParseCommandLine({flag}, {});
    ASSERT_FALSE(line.ok()) << flag;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr("wants relay.upstream"));
  }
}

}  // namespace
}  // namespace ballast
