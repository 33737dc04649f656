// The two ends of links by NCCL, on a library that the tests play (fake_nccl.h) and its GPUs (fake_cuda.h).
#pragma once

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "proto/nccl/nccl_link.h"

#include "tests/client/fake_cuda.h"
#include "tests/client/fake_nccl.h"

namespace ballast {

inline constexpr double kLongS = 60, kShortS = 0.05;  // of patience; short where it is to pass
inline constexpr uint64_t kEndBytes = 16 << 20;       // of an end's memory; no socket takes half of it

template <typename Fake>
Fake* FakeOf(const char* library, const char* function) {
  void* const opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Fake* (*)()>(dlsym(opened, function))();
}

// An end of a link, with memory of its GPU.
struct NcclEnd {
  std::byte* at(uint64_t offset) const { return memory->data() + offset; }
  std::string Read(uint64_t offset, uint64_t bytes) const {
    std::string read(bytes, '?');
    EXPECT_TRUE(gpu->Copy(read.data(), at(offset), bytes).ok());
    return read;
  }
  void Write(uint64_t offset, const std::string& bytes) const {
    EXPECT_TRUE(gpu->Copy(at(offset), bytes.data(), bytes.size()).ok());
  }
  std::shared_ptr<Gpu> gpu;
  std::unique_ptr<Gpu::Memory> memory;
  std::unique_ptr<NcclLink> link;
};

inline absl::StatusOr<NcclEnd> OpenNcclEnd(const std::string& id, NcclLink::Side side, int gpu) {
  const auto nccl = Nccl::Load(FAKE_NCCL);
  if (!nccl.ok()) return nccl.status();
  auto opened = Gpu::Open(gpu, FAKE_CUDA);
  if (!opened.ok()) return opened.status();
  auto memory = (*opened)->Allocate(kEndBytes);
  if (!memory.ok()) return memory.status();
  auto link = NcclLink::Open(*nccl, *opened, id, side);
  if (!link.ok()) return link.status();
  return NcclEnd{*std::move(opened), *std::move(memory), *std::move(link)};
}

struct NcclPair {
  NcclEnd from, to;
};

inline absl::StatusOr<NcclPair> OpenNcclPair() {
  const auto nccl = Nccl::Load(FAKE_NCCL);
  if (!nccl.ok()) return nccl.status();
  const auto id = (*nccl)->MakeId();
  if (!id.ok()) return id.status();
  auto from = OpenNcclEnd(*id, NcclLink::Side::kSends, 0);
  if (!from.ok()) return from.status();
  auto to = OpenNcclEnd(*id, NcclLink::Side::kReceives, 1);
  if (!to.ok()) return to.status();
  return NcclPair{*std::move(from), *std::move(to)};
}

inline absl::Status AwaitNcclPair(const NcclPair& pair) {
  absl::Status ready = pair.from.link->AwaitReady(kLongS);
  if (ready.ok()) ready = pair.to.link->AwaitReady(kLongS);
  return ready;
}

class NcclEndsTest : public ::testing::Test {
 protected:
  NcclEndsTest() {
    cuda_.Reset();
    nccl_.Reset();
  }
  ~NcclEndsTest() override { ExpectNothingLeft("at the end"); }

  void ExpectNothingLeft(const std::string& when) {
    EXPECT_EQ(cuda_.live(), FakeCuda::Live()) << when;
    EXPECT_THAT(cuda_.current(), ::testing::IsEmpty()) << when;
    EXPECT_EQ(nccl_.live(), 0) << when;
    EXPECT_FALSE(nccl_.in_group()) << when;
  }
  static NcclPair Linked() {
    NcclPair pair = OpenNcclPair().value();
    EXPECT_TRUE(AwaitNcclPair(pair).ok());
    return pair;
  }
  // Two groups from beginning to end.
  static absl::Status Use() {
    const auto pair = OpenNcclPair();
    if (!pair.ok()) return pair.status();
    absl::Status used = AwaitNcclPair(*pair);
    const NcclEnd &from = pair->from, &to = pair->to;
    for (int i = 0; i < 2 && used.ok(); ++i) {
      used = from.link->Begin({{from.at(0), 100}, {from.at(200), 10}}, kLongS);
      if (used.ok()) used = to.link->Begin({{to.at(0), 100}, {to.at(200), 10}}, kLongS);
    }
    for (const NcclEnd* end : {&from, &to}) {
      if (used.ok()) used = end->link->AwaitDone(kLongS);
    }
    return used;
  }

  FakeCuda& cuda_ = *FakeOf<FakeCuda>(FAKE_CUDA, "FakeCudaOfTests");
  FakeNccl& nccl_ = *FakeOf<FakeNccl>(FAKE_NCCL, "FakeNcclOfTests");
};

}  // namespace ballast
