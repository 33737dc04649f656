// A daemon on a GPU with NCCL, both played by the tests (fake_gpu.h, fake_nccl.h).
#pragma once

#include <dlfcn.h>

#include "tests/client/fake_nccl.h"
#include "tests/client/transport/gpu_team.h"

namespace ballast {

inline FakeNccl& StandIn() {
  Cuda();
  static void* const library = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);  // found by its name from then on
  static FakeNccl* const nccl = reinterpret_cast<FakeNcclFunction>(dlsym(library, "FakeNcclOfTests"))();
  return *nccl;
}

inline Config WithNccl() {
  Config config = RealDaemon::Small();
  config.shm_socket = "off";
  config.nccl = true;
  return config;
}

}  // namespace ballast
