#include "client/cpp/stream/chunk_memory.h"

#include <gtest/gtest.h>

#include <utility>

#include "client/cpp/stream/retransmit_buffer.h"

namespace ballast {
namespace {

constexpr uint64_t kLarge = ChunkMemory::kLeastReused;

std::vector<std::byte> Bytes(uint64_t count, int value) { return std::vector<std::byte>(count, std::byte(value)); }

TEST(ChunkMemoryTest, ACopyIsMadeInTheMemoryOfOneThatWasFreed) {
  ChunkMemory memory;
  std::vector<std::string> freed;
  freed.push_back(memory.Copy(Bytes(2 * kLarge, 1)));
  const char* const place = freed[0].data();
  memory.Keep(&freed);
  EXPECT_TRUE(freed.empty());
  EXPECT_GE(memory.kept_bytes(), 2 * kLarge);
  const std::string copy = memory.Copy(Bytes(kLarge, 2));
  EXPECT_EQ(copy.data(), place);
  EXPECT_EQ(copy, std::string(kLarge, 2));
  EXPECT_EQ(memory.kept_bytes(), 0u);
}

TEST(ChunkMemoryTest, WhatIsTooSmallIsCopiedAnew) {
  ChunkMemory memory;
  std::vector<std::string> freed;
  freed.push_back(memory.Copy(Bytes(kLarge, 1)));
  const uint64_t larger = freed[0].capacity() + 1;
  memory.Keep(&freed);
  EXPECT_EQ(memory.Copy(Bytes(larger, 2)), std::string(larger, 2));
}

TEST(ChunkMemoryTest, SmallOnesTakeNothingOfItAndAreNotKept) {
  ChunkMemory memory;
  std::vector<std::string> freed;
  freed.push_back(memory.Copy(Bytes(kLarge, 1)));
  memory.Keep(&freed);
  const uint64_t kept = memory.kept_bytes();
  freed.push_back(memory.Copy(Bytes(kLarge / 2, 2)));
  EXPECT_EQ(freed[0], std::string(kLarge / 2, 2));
  memory.Keep(&freed);
  EXPECT_EQ(memory.kept_bytes(), kept);
}

TEST(ChunkMemoryTest, KeepsNoMoreThanItMay) {
  ChunkMemory memory;
  std::vector<std::string> freed(3);
  for (std::string& chunk : freed) chunk.reserve(ChunkMemory::kMostKept / 2 - 64);
  memory.Keep(&freed);
  EXPECT_GE(memory.kept_bytes(), 2 * (ChunkMemory::kMostKept / 2 - 64));
  EXPECT_LE(memory.kept_bytes(), ChunkMemory::kMostKept);
}

TEST(ChunkMemoryTest, FreedChunksGoBackWhenTheirHolderIsGone) {
  ChunkMemory memory;
  {
    FreedChunks freed(&memory);
    freed.get()->chunks.push_back(memory.Copy(Bytes(kLarge, 1)));
    EXPECT_EQ(memory.kept_bytes(), 0u);
  }
  EXPECT_GE(memory.kept_bytes(), kLarge);
}

}  // namespace
}  // namespace ballast
