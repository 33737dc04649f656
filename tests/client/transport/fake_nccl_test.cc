// That the NCCL which the tests play is as strict as NCCL, or stricter: fake_nccl.h.
#include "tests/client/fake_nccl.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>
#include <utility>

#include "proto/gpu/gpu.h"

#include "tests/client/fake_cuda.h"

namespace ballast {
namespace {

using ::testing::StrEq;

constexpr int kOk = 0, kBadArgument = 4, kBadUsage = 5, kUnderWay = 7, kNoCuda = 1;

struct RawId {
  std::array<char, 128> bytes = {};
};
struct RawConfig {
  size_t size = sizeof(RawConfig);
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;
};

template <typename Function>
Function* NcclFunction(const char* name) {
  static void* const library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

class FakeNcclTest : public ::testing::Test {
 protected:
  FakeNcclTest() {
    auto* const driver = dlsym(dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL), "FakeCudaOfTests");
    cuda_ = reinterpret_cast<FakeCudaFunction>(driver)();
    cuda_->Reset();
    nccl_.Reset();
    gpu_ = Gpu::Open(0, FAKE_CUDA).value();
    stream_ = gpu_->NewStream().value();
    memory_ = gpu_->Allocate(100).value();
    EXPECT_EQ(NcclFunction<int(RawId*)>("ncclGetUniqueId")(&id_), kOk);
  }
  ~FakeNcclTest() override {
    nccl_.Reset();  // else their streams never end
    EXPECT_EQ(nccl_.live(), 0);
  }

  int Init(void** communicator, int rank, RawConfig config = {}, int ranks = 2) const {
    return NcclFunction<int(void**, int, RawId, int, RawConfig*)>("ncclCommInitRankConfig")(communicator, ranks, id_,
                                                                                            rank, &config);
  }
  static int State(void* communicator) {
    int state = -1;
    const int result = NcclFunction<int(void*, int*)>("ncclCommGetAsyncError")(communicator, &state);
    return result == kOk ? state : result;
  }
  static int AwaitState(void* communicator) {
    int state = kUnderWay;
    while (state == kUnderWay) {
      state = State(communicator);
      std::this_thread::yield();
    }
    return state;
  }
  int Send(void* communicator, const void* at, size_t bytes, int peer, int type = 1) const {
    const auto send = NcclFunction<int(const void*, size_t, int, int, void*, void*)>("ncclSend");
    return send(at, bytes, type, peer, communicator, stream_->handle());
  }
  int Receive(void* communicator, void* at, size_t bytes, int peer) const {
    const auto receive = NcclFunction<int(void*, size_t, int, int, void*, void*)>("ncclRecv");
    return receive(at, bytes, 1, peer, communicator, stream_->handle());
  }
  // Calls with the GPU current.
  template <typename Call>
  void OnGpu(const Call& call) const {
    const auto called = [&] {
      call();
      return absl::OkStatus();
    };
    EXPECT_TRUE(gpu_->InContext(called).ok());
  }
  std::pair<void*, void*> Connected() const {
    std::pair<void*, void*> both = {nullptr, nullptr};
    OnGpu([&] {
      EXPECT_EQ(Init(&both.first, 0), kUnderWay);
      EXPECT_EQ(Init(&both.second, 1), kUnderWay);
    });
    EXPECT_EQ(AwaitState(both.first), kOk);
    EXPECT_EQ(AwaitState(both.second), kOk);
    return both;
  }

  FakeCuda* cuda_ = nullptr;
  FakeNccl& nccl_ = *NcclFunction<FakeNccl*()>("FakeNcclOfTests")();
  std::shared_ptr<Gpu> gpu_;
  std::unique_ptr<Gpu::Memory> memory_;
  std::unique_ptr<Gpu::Stream> stream_;
  RawId id_;
};

TEST_F(FakeNcclTest, RefusesConfigsRanksAndThreadsWithoutAGpu) {
  void* communicator = nullptr;
  EXPECT_EQ(Init(&communicator, 0), kNoCuda);
  OnGpu([&] {
    EXPECT_EQ(Init(&communicator, 0, {.size = 8}), kBadArgument);
    EXPECT_EQ(Init(&communicator, 0, {.magic = 0}), kBadArgument);
    EXPECT_EQ(Init(&communicator, 0, {.version = 21303}), kBadArgument);
    EXPECT_EQ(Init(&communicator, 0, {.blocking = 1}), kBadArgument);
    EXPECT_EQ(Init(&communicator, 0, {}, 3), kBadArgument);
    EXPECT_EQ(Init(&communicator, 2), kBadArgument);
    EXPECT_EQ(Init(&communicator, -1), kBadArgument);
  });
  EXPECT_EQ(communicator, nullptr);
  EXPECT_EQ(nccl_.live(), 0);
  EXPECT_EQ(State(nullptr), kBadArgument);
}

TEST_F(FakeNcclTest, RefusesACallWhileTheLastIsUnderWay) {
  void* communicator = nullptr;
  OnGpu([&] {
    ASSERT_EQ(Init(&communicator, 0), kUnderWay);
    EXPECT_EQ(State(communicator), kUnderWay);
    EXPECT_EQ(Receive(communicator, memory_->data(), 1, 1), kBadArgument);
  });
  EXPECT_EQ(State(communicator), kBadArgument);
  EXPECT_THAT(NcclFunction<const char*(void*)>("ncclGetLastError")(communicator),
              StrEq("Attempt to use communicator before the previous operation returned ncclSuccess"));
}

TEST_F(FakeNcclTest, RefusesWhatTheCommunicatorCannotMove) {
  struct Wrong {
    const void* at = nullptr;
    int peer = 1, type = 1, result = kBadArgument;
  };
  const std::byte* const at = memory_->data();
  for (const Wrong& wrong : {Wrong{at, 2}, Wrong{at, 0}, Wrong{at, 1, 7}, Wrong{nullptr}, Wrong{at, 1, 1, kBadUsage}}) {
    EXPECT_EQ(NcclFunction<int(RawId*)>("ncclGetUniqueId")(&id_), kOk);
    void* const communicator = Connected().first;
    const auto send = [&] { EXPECT_EQ(Send(communicator, wrong.at, 1, wrong.peer, wrong.type), wrong.result); };
    if (wrong.result == kBadUsage) {
      send();  // with no GPU
    } else {
      OnGpu(send);
    }
    EXPECT_EQ(State(communicator), wrong.result);
    nccl_.Reset();
  }
}

TEST_F(FakeNcclTest, AGroupBeginsNothingBeforeItsEndAndNothingIfACallFailed) {
  const auto group_start = NcclFunction<int()>("ncclGroupStart"), group_end = NcclFunction<int()>("ncclGroupEnd");
  EXPECT_EQ(group_end(), kBadUsage);
  const auto [first, second] = Connected();
  OnGpu([&] {
    EXPECT_EQ(group_start(), kOk);
    EXPECT_EQ(Send(first, memory_->data(), 1, 1), kOk);
    EXPECT_TRUE(nccl_.in_group());
    EXPECT_EQ(State(first), kOk);
    EXPECT_EQ(Receive(first, memory_->data(), 1, 1), kBadUsage);
    EXPECT_EQ(group_end(), kBadUsage);
  });
  EXPECT_FALSE(nccl_.in_group());
  EXPECT_EQ(State(first), kBadUsage);
  EXPECT_EQ(State(second), kOk);
  EXPECT_EQ(cuda_->live().works, 0);
}

TEST_F(FakeNcclTest, ReadsWhenTheStreamHasComeToIt) {
  const auto [to, from] = Connected();
  const auto other = gpu_->NewStream().value();
  std::array<char, 2> host = {'?', '?'};
  const auto address = [](const void* at) { return reinterpret_cast<unsigned long long>(at); };
  const auto copy = reinterpret_cast<int (*)(unsigned long long, unsigned long long, size_t, void*)>(
      dlsym(dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL), "cuMemcpyAsync"));
  OnGpu([&, from_ = from, to_ = to] {
    EXPECT_EQ(copy(address(memory_->data()), address("ab"), 2, stream_->handle()), 0);
    EXPECT_EQ(Send(from_, memory_->data(), 2, 0), kUnderWay);
    const auto receive = NcclFunction<int(void*, size_t, int, int, void*, void*)>("ncclRecv");
    EXPECT_EQ(receive(host.data(), 2, 1, 1, to_, other->handle()), kUnderWay);  // the host's memory
  });
  EXPECT_EQ(AwaitState(from), kOk);
  EXPECT_EQ(AwaitState(to), kOk);
  EXPECT_FALSE(other->Done().value());
  EXPECT_EQ(nccl_.sent(), 0);
  EXPECT_FALSE(stream_->Done().value());  // copies
  while (!other->Done().value()) std::this_thread::yield();
  EXPECT_EQ(host, (std::array<char, 2>{'a', 'b'}));
}

}  // namespace
}  // namespace ballast
