// A process that trains as one rank of a ConstantTeam by NCCL, between the tests' GPUs, until it is killed or refused:
// nccl_trainer SERVER RANK WORLD. It takes the rank over from a process that was killed.
#include <dlfcn.h>

#include <iostream>

#include "absl/strings/numbers.h"

#include "tests/client/constant_team.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

absl::Status Train(const std::string& server, uint32_t rank, uint32_t world) {
  auto client = Client::Connect({.server = server, .log = [](const std::string&) {}});
  if (!client.ok()) return client.status();
  ConstantTeam team(rank);
  const AttachOptions options{.rank = rank,
                              .world = world,
                              .takeover = true,
                              .transport = TransportChoice::kNccl,
                              .gpu = static_cast<int>(rank % 2)};
  if (auto s = team.Join(**client, options); !s.ok()) return s;
  const auto loaded = [&] {
    const auto run = (*client)->GetRun(ConstantTeam::kRun);
    return run.ok() && run->status().weights_loaded();
  };
  if (!Soon(loaded)) return absl::DeadlineExceededError("rank 0 has loaded no weights");
  for (;;) {
    if (auto s = team.Step(**client); !s.ok()) return s;
  }
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  uint32_t rank = 0, world = 0;
  if (argc != 4 || !absl::SimpleAtoi(argv[2], &rank) || !absl::SimpleAtoi(argv[3], &world)) return 2;
  for (const char* library : {FAKE_CUDA, FAKE_NCCL}) {
    if (dlopen(library, RTLD_NOW | RTLD_LOCAL) == nullptr) std::cerr << dlerror() << "\n";
  }
  std::cerr << ballast::Train(argv[1], rank, world) << "\n";
  return 1;
}
