// NCCL's interface as its library exports it. For nccl.cc and nccl_link.cc.
#pragma once

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "proto/loaded_function.h"
#include "proto/nccl/nccl.h"

namespace ballast {

struct Nccl::Functions {
  enum Result { kSuccess = 0, kRemoteError = 6, kInProgress = 7, kTimeout = 8, kSystemError = 2 };  // ncclResult_t
  static constexpr int kBytes = 1;                                                                  // ncclUint8
  using Communicator = void*;                                                                       // ncclComm_t
  struct Id {                                                                                       // ncclUniqueId
    std::array<char, kIdBytes> bytes = {};
  };
  // ncclConfig_t of 2.14; later versions take it, and their own defaults for what it lacks.
  struct Config {
    size_t bytes = sizeof(Config);
    unsigned magic = 0xcafebeef, version = 21400;
    int blocking = 0;
  };

  template <typename R, typename... Args>
  using Function = LoadedFunction<R, Args...>;

  explicit Functions(void* opened) : library(opened) {}
  // An error, unless the result is success, or in progress.
  absl::Status Check(int result, const char* name, Communicator communicator = nullptr) const;

  void* const library;  // never closed: it has threads
  const char* lacks = nullptr;
  Function<int, int*> get_version{this, "ncclGetVersion"};
  Function<int, Id*> get_id{this, "ncclGetUniqueId"};
  Function<int, Communicator*, int, Id, int, Config*> init{this, "ncclCommInitRankConfig"};
  Function<int, Communicator, int*> get_async_error{this, "ncclCommGetAsyncError"};
  Function<int, Communicator> abort{this, "ncclCommAbort"};
  Function<int> group_start{this, "ncclGroupStart"};
  Function<int> group_end{this, "ncclGroupEnd"};
  Function<int, const void*, size_t, int, int, Communicator, void*> send{this, "ncclSend"};
  Function<int, void*, size_t, int, int, Communicator, void*> receive{this, "ncclRecv"};
  Function<const char*, int> error_text{this, "ncclGetErrorString"};
  Function<const char*, Communicator> last_error{this, "ncclGetLastError"};
};

}  // namespace ballast
