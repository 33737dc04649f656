#include "server/rpc/peer_identity.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(PeerAddressTest, IsTheAddressOfIpv4AndTheNetworkOfIpv6) {
  EXPECT_EQ(PeerAddress("ipv4:10.0.0.7:1234"), "10.0.0.7");
  EXPECT_EQ(PeerAddress("ipv6:%5B2001:db8:0:1:2:3:4:5%5D:1234"), "2001:db8:0:1::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5B2001:db8:0:1:ffff::1%5D:80"), PeerAddress("ipv6:%5B2001:db8:0:1::2%5D:9"));
  EXPECT_EQ(PeerAddress("ipv6:%5B::1%5D:80"), "::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5Bfe80::1%25eth0%5D:80"), "fe80::/64");
}

TEST(PeerAddressTest, NothingIsKnownOfASocketOrOfNonsense) {
  for (const char* peer : {"", "unix:", "unix:/run/ballast", "ipv6:", "ipv6:%5B", "ipv6:%5Bx%5D:1", "dns:a"}) {
    EXPECT_EQ(PeerAddress(peer), "") << peer;
  }
}

}  // namespace
}  // namespace ballast
