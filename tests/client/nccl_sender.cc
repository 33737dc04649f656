// A process that sends a text to the one that started it, from one fake GPU to another: nccl_sender ID TEXT, the id of the link
// in hexadecimal digits.
#include <iostream>
#include <string>

#include "absl/strings/escaping.h"
#include "proto/nccl/nccl_link.h"

namespace ballast {
namespace {

absl::Status SendText(const std::string& id, const std::string& text) {
  constexpr double kPatienceS = 60;
  const auto nccl = Nccl::Load(FAKE_NCCL);
  if (!nccl.ok()) return nccl.status();
  const auto gpu = Gpu::Open(0, FAKE_CUDA);
  if (!gpu.ok()) return gpu.status();
  const auto memory = (*gpu)->Allocate(text.size());
  if (!memory.ok()) return memory.status();
  if (auto s = (*gpu)->Copy((*memory)->data(), text.data(), text.size()); !s.ok()) return s;
  const auto link = NcclLink::Open(*nccl, *gpu, absl::HexStringToBytes(id), NcclLink::Side::kSends);
  if (!link.ok()) return link.status();
  if (auto s = (*link)->AwaitReady(kPatienceS); !s.ok()) return s;
  if (auto s = (*link)->Begin({{(*memory)->data(), text.size()}}, kPatienceS); !s.ok()) return s;
  return (*link)->AwaitDone(kPatienceS);
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const absl::Status sent = ballast::SendText(argv[1], argv[2]);
  if (!sent.ok()) std::cerr << sent << "\n";
  return sent.ok() ? 0 : 1;
}
