// What relays learn of those above them.
#include "server/relay/relay_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::GetServerResponse Says(const RelayPath& path) {
  v1::GetServerResponse server;
  *server.mutable_relay() = path.info();
  return server;
}

TEST(RelayPathTest, ItsIdGoesDownTheTree) {
  RelayPath top("trainer:7700"), middle("top:7700"), leaf("middle:7700");
  EXPECT_TRUE(top.Learn({}).ok());
  EXPECT_TRUE(middle.Learn(Says(top)).ok());
  EXPECT_TRUE(leaf.Learn(Says(middle)).ok());
  EXPECT_EQ(leaf.info().upstream(), "middle:7700");
  EXPECT_THAT(leaf.info().above(), ElementsAre(middle.info().id(), top.info().id()));
  EXPECT_NE(top.info().id(), middle.info().id());
  EXPECT_TRUE(leaf.Learn({}).ok());  // it follows the trainer's daemon by now
  EXPECT_THAT(leaf.info().above(), ElementsAre());
}

TEST(RelayPathTest, ACircleIsFoundByAllInIt) {
  RelayPath a("b"), b("c"), c("a"), outside("a");
  int found_a = 0, found_b = 0, found_c = 0;
  for (int i = 0; i < 4; ++i) {
    found_a += a.Learn(Says(b)).ok() ? 0 : 1;
    found_b += b.Learn(Says(c)).ok() ? 0 : 1;
    found_c += c.Learn(Says(a)).ok() ? 0 : 1;
  }
  EXPECT_GE(found_a, 1);
  EXPECT_GE(found_b, 1);
  EXPECT_GE(found_c, 1);
  EXPECT_THAT(std::string(a.Learn(Says(b)).message()), HasSubstr("no daemon in this circle trains"));
  RelayPath own("own");
  EXPECT_EQ(own.Learn(Says(own)).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(RelayPathTest, WhatIsKeptOfThoseAboveHasAnEnd) {
  v1::GetServerResponse deep;
  deep.mutable_relay()->set_id(1);
  for (uint64_t id = 2; id < RelayPath::kMostRelays; ++id) deep.mutable_relay()->add_above(id);
  RelayPath path("deep");
  EXPECT_TRUE(path.Learn(deep).ok()) << "it is the sixteenth";
  deep.mutable_relay()->add_above(99);
  EXPECT_FALSE(path.Learn(deep).ok());
  for (uint64_t id = 100; id < 1000; ++id) deep.mutable_relay()->add_above(id);
  EXPECT_THAT(std::string(path.Learn(deep).message()), HasSubstr("are 16 relays already"));
  EXPECT_EQ(path.info().above_size(), 16);
}

}  // namespace
}  // namespace ballast
