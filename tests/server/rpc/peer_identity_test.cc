#include "server/rpc/peer_identity.h"

#include <gtest/gtest.h>

#include <string>

namespace ballast {
namespace {

TEST(PeerAddressTest, IsTheAddressOfIpv4AndTheNetworkOfIpv6) {
  EXPECT_EQ(PeerAddress("ipv4:10.0.0.7:1234"), "10.0.0.7");
  EXPECT_EQ(PeerAddress("ipv6:%5B2001:db8:0:1:2:3:4:5%5D:1234"), "2001:db8:0:1::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5B2001:db8:0:1:ffff::1%5D:80"), PeerAddress("ipv6:%5B2001:db8:0:1::2%5D:9"));
  EXPECT_EQ(PeerAddress("ipv6:%5B::1%5D:80"), "::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5Bfe80::1%25eth0%5D:80"), "fe80::/64");
}

TEST(PeerIdentityTest, IsTheSpiffeIdOrElseTheCommonName) {
  EXPECT_EQ(IdentityOf({.spiffe_id = "spiffe://a/b", .uri = "spiffe://a/b", .common_name = "c"}), "spiffe://a/b");
  EXPECT_EQ(IdentityOf({.common_name = "trainer"}), "trainer");
  EXPECT_EQ(IdentityOf({.uri = "spiffe:", .common_name = "trainer"}), "") << "it is no other's by its common name";
  EXPECT_EQ(IdentityOf({.common_name = "SPIFFE://a/b"}), "");
}

TEST(PeerIdentityTest, ALongOneIsWholeOrNobodys) {
  const std::string longest = "spiffe://a/" + std::string(2048 - 11, 'x');
  EXPECT_EQ(IdentityOf({.spiffe_id = longest, .uri = longest}), longest);
  const std::string longer = longest + "y";
  EXPECT_EQ(IdentityOf({.spiffe_id = longer, .uri = longer, .common_name = "trainer"}), "");
  EXPECT_EQ(IdentityOf({.common_name = std::string(2049, 'x')}), "");
}

TEST(PeerIdentityTest, WhatIsNoTextIsNobodys) {
  for (const char* name : {"a\xff", "a\xfe", "\xc0\xae"}) EXPECT_EQ(IdentityOf({.common_name = name}), "") << name;
}

TEST(PeerAddressTest, NothingIsKnownOfASocketOrOfNonsense) {
  for (const char* peer : {"", "unix:", "unix:/run/ballast", "ipv6:", "ipv6:%5B", "ipv6:%5Bx%5D:1", "dns:a"}) {
    EXPECT_EQ(PeerAddress(peer), "") << peer;
  }
}

}  // namespace
}  // namespace ballast
