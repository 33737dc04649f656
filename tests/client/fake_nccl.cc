#include "tests/client/fake_nccl.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/fake_cuda.h"
#include "tests/client/fake_nccl_communicator.h"
#include "tests/client/fake_nccl_root.h"

namespace ballast {
namespace {

using Communicator = FakeNcclCommunicator;

struct UniqueId {  // ncclUniqueId
  std::array<char, 128> bytes = {};
};
struct Config {  // ncclConfig_t of 2.14
  size_t size = 0;
  unsigned magic = 0, version = 0;
  int blocking = 1;
};

// What the calling thread began between ncclGroupStart and ncclGroupEnd.
struct OpenGroup {
  int depth = 0, error = nccl::kSuccess;
  std::map<std::shared_ptr<Communicator>, Communicator::Group> parts;
};
thread_local OpenGroup open_group;

class Nccl final : public FakeNccl {
 public:
  static Nccl& Get() {
    static auto* const library = new Nccl;  // for good: it may have threads
    return *library;
  }
  int GetVersion(int* version);
  int MakeId(UniqueId* id);
  int Init(void** communicator, int ranks, const UniqueId& id, int rank, const Config* config);
  int State(void* communicator, int* state);
  int Abort(void* communicator);
  int StartGroup();
  int EndGroup();
  int Give(bool sends, const Communicator::Piece& piece, int type, int peer, void* communicator, void* stream);
  const char* LastError(void* communicator);

  int64_t live() override;
  int64_t calls() override { return calls_; }
  void FailCall(const char* function, int64_t number, int result) override;
  bool failed() override;
  void HoldLaunches(bool held) override { Set(&control_.hold_launches, held); }
  void HoldTransfers(bool held) override { Set(&control_.hold_transfers, held); }
  bool AwaitHeld() override;
  void HoldAborts(bool held) override { Set(&control_.hold_aborts, held); }
  bool AwaitHeldAborts(int count) override;
  void Silent(bool silent) override { Set(&control_.silent, silent); }
  void Break() override;
  void SetVersion(int version) override;
  int64_t sent() override;
  int64_t received() override;
  bool in_group() override { return open_group.depth > 0; }
  void Reset() override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  int Count(const char* function);
  int Refuse(int result, const std::string& text);
  int Add(bool sends, const Communicator::Piece& piece, int type, int peer, void* stream,
          const std::shared_ptr<Communicator>& communicator);
  std::shared_ptr<Communicator> Find(void* communicator);
  void Set(bool* what, bool to);
  int CloseGroup();

  FakeNcclControl control_;
  std::atomic<int64_t> calls_ = 0;
  // Of its mutex:
  int64_t until_failure_ = 0;
  std::string failing_, last_error_;
  int failure_ = nccl::kSuccess;
  bool failed_ = false;
  int version_ = 22703;
  uint64_t last_communicator_ = 0x1000;
  std::map<void*, std::shared_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<FakeNcclRoot>> roots_;
};

FakeCuda* LoadedCuda() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) return nullptr;
  const auto cuda = reinterpret_cast<FakeCudaFunction>(dlsym(library, "FakeCudaOfTests"));
  return cuda == nullptr ? nullptr : cuda();
}

// Not success: what the call is to return.
int Nccl::Count(const char* function) {
  ++calls_;
  const Lock lock(control_.mu);
  if (until_failure_ == 0 || failing_ != function || --until_failure_ > 0) return nccl::kSuccess;
  failed_ = true;
  return failure_;
}

int Nccl::Refuse(int result, const std::string& text) {
  const Lock lock(control_.mu);
  last_error_ = text;
  return result;
}

std::shared_ptr<Communicator> Nccl::Find(void* communicator) {
  const Lock lock(control_.mu);
  const auto found = communicators_.find(communicator);
  return found == communicators_.end() ? nullptr : found->second;
}

int Nccl::GetVersion(int* version) {
  if (const int failure = Count("ncclGetVersion"); failure != nccl::kSuccess) return failure;
  const Lock lock(control_.mu);
  *version = version_;
  return nccl::kSuccess;
}

// --- communicators --------------------------------------------------------------------------------------------------

int Nccl::MakeId(UniqueId* id) {
  if (const int failure = Count("ncclGetUniqueId"); failure != nccl::kSuccess) return failure;
  auto root = std::make_unique<FakeNcclRoot>();
  *id = {};
  std::memcpy(id->bytes.data(), root->name().data(), root->name().size());
  const Lock lock(control_.mu);
  roots_.push_back(std::move(root));
  return nccl::kSuccess;
}

int Nccl::Init(void** communicator, int ranks, const UniqueId& id, int rank, const Config* config) {
  if (const int failure = Count("ncclCommInitRankConfig"); failure != nccl::kSuccess) return failure;
  if (config == nullptr || config->size < sizeof(Config) || config->magic != 0xcafebeef) {
    return Refuse(nccl::kInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  if (config->version < 21400 || config->blocking != 0) {
    return Refuse(nccl::kInvalidArgument, "this NCCL does not block, which 2.14 began with");
  }
  if (ranks != 2 || rank < 0 || rank > 1) return Refuse(nccl::kInvalidArgument, "Invalid rank requested");
  FakeCuda* const cuda = LoadedCuda();
  const int gpu = cuda == nullptr ? -1 : cuda->current_gpu();
  if (gpu < 0) return Refuse(nccl::kCudaError, "no context is current");
  const std::string name(id.bytes.data(), strnlen(id.bytes.data(), id.bytes.size()));
  const auto made = std::make_shared<Communicator>(&control_, cuda, gpu, name, rank);
  const Lock lock(control_.mu);
  *communicator = reinterpret_cast<void*>(++last_communicator_);
  communicators_[*communicator] = made;
  return nccl::kInProgress;
}

int Nccl::State(void* communicator, int* state) {
  if (const int failure = Count("ncclCommGetAsyncError"); failure != nccl::kSuccess) return failure;
  const auto found = Find(communicator);
  if (found == nullptr) return Refuse(nccl::kInvalidArgument, "no such communicator");
  *state = found->state();
  return nccl::kSuccess;
}

int Nccl::Abort(void* communicator) {
  const int failure = Count("ncclCommAbort");
  const auto found = Find(communicator);
  if (found == nullptr) return Refuse(nccl::kInvalidArgument, "no such communicator");
  Lock lock(control_.mu);
  if (control_.hold_aborts) {
    ++control_.held_aborts;
    control_.changed.notify_all();
    control_.changed.wait(lock, [this] { return !control_.hold_aborts; });
    --control_.held_aborts;
  }
  lock.unlock();
  found->Abort();
  lock.lock();
  communicators_.erase(communicator);
  return failure;
}

// --- groups ---------------------------------------------------------------------------------------------------------

int Nccl::StartGroup() {
  if (const int failure = Count("ncclGroupStart"); failure != nccl::kSuccess) return failure;
  ++open_group.depth;
  return nccl::kSuccess;
}

int Nccl::EndGroup() {
  const int failure = Count("ncclGroupEnd");
  if (open_group.depth == 0) return Refuse(nccl::kInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (failure != nccl::kSuccess) open_group.error = failure;
  return CloseGroup();
}

int Nccl::CloseGroup() {
  if (--open_group.depth > 0) return nccl::kSuccess;
  const OpenGroup ended = std::exchange(open_group, OpenGroup());
  for (const auto& [communicator, group] : ended.parts) {
    if (ended.error != nccl::kSuccess) {
      communicator->Fail(ended.error, "a call of the group failed");
    } else {
      communicator->Begin(group);
    }
  }
  if (ended.error != nccl::kSuccess) return ended.error;
  return ended.parts.empty() ? nccl::kSuccess : nccl::kInProgress;
}

int Nccl::Give(bool sends, const Communicator::Piece& piece, int type, int peer, void* communicator, void* stream) {
  int result = Count(sends ? "ncclSend" : "ncclRecv");
  const auto found = Find(communicator);
  if (result == nccl::kSuccess && found == nullptr) result = Refuse(nccl::kInvalidArgument, "no such communicator");
  ++open_group.depth;
  if (result == nccl::kSuccess) result = Add(sends, piece, type, peer, stream, found);
  if (result != nccl::kSuccess) {
    open_group.error = result;
    if (found != nullptr) found->Fail(result, LastError(nullptr));
  }
  const int closed = CloseGroup();
  return result != nccl::kSuccess ? result : closed;
}

int Nccl::Add(bool sends, const Communicator::Piece& piece, int type, int peer, void* stream,
              const std::shared_ptr<Communicator>& communicator) {
  const int state = communicator->state();
  if (state == nccl::kInProgress) {
    return Refuse(nccl::kInvalidArgument,
                  "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  if (state != nccl::kSuccess) return state;
  if (type != 1) return Refuse(nccl::kInvalidArgument, "this NCCL moves bytes alone");
  if (peer != 1 - communicator->rank()) return Refuse(nccl::kInvalidArgument, "Invalid root");
  if (piece.at == nullptr && piece.bytes > 0) return Refuse(nccl::kInvalidArgument, "no memory");
  if (LoadedCuda()->current_gpu() != communicator->gpu()) {
    return Refuse(nccl::kInvalidUsage, "the communicator's GPU is not the current one");
  }
  const auto [part, is_new] = open_group.parts.try_emplace(communicator);
  Communicator::Group& group = part->second;
  if (is_new) group = {.sends = sends, .stream = stream, .pieces = {}};
  if (group.sends != sends || group.stream != stream) {
    return Refuse(nccl::kInvalidUsage, "this NCCL moves the bytes of a group one way, on one stream");
  }
  group.pieces.push_back(piece);
  return nccl::kSuccess;
}

// The communicator's, which NCCL does not tell apart; of a call that failed without it that call's.
const char* Nccl::LastError(void* communicator) {
  thread_local std::string told;
  const auto found = Find(communicator);
  const std::string own = found == nullptr ? "" : found->error();
  const Lock lock(control_.mu);
  told = own.empty() ? last_error_ : own;
  return told.c_str();
}

// --- what tests see and set -----------------------------------------------------------------------------------------

int64_t Nccl::live() {
  const Lock lock(control_.mu);
  return static_cast<int64_t>(communicators_.size());
}

void Nccl::FailCall(const char* function, int64_t number, int result) {
  const Lock lock(control_.mu);
  failing_ = function;
  until_failure_ = number;
  failure_ = result;
  failed_ = false;
}

bool Nccl::failed() {
  const Lock lock(control_.mu);
  return failed_;
}

bool Nccl::AwaitHeld() {
  Lock lock(control_.mu);
  const auto is_held = [this] { return control_.hold_transfers && control_.held > 0; };
  return control_.changed.wait_for(lock, std::chrono::minutes(1), is_held);
}

bool Nccl::AwaitHeldAborts(int count) {
  Lock lock(control_.mu);
  return control_.changed.wait_for(lock, std::chrono::minutes(1), [&] { return control_.held_aborts >= count; });
}

void Nccl::Break() {
  std::map<void*, std::shared_ptr<Communicator>> all;
  {
    const Lock lock(control_.mu);
    all = communicators_;
  }
  for (const auto& [handle, communicator] : all) communicator->Fail(nccl::kSystemError, "the network is down");
}

void Nccl::SetVersion(int version) {
  const Lock lock(control_.mu);
  version_ = version;
}

int64_t Nccl::sent() {
  const Lock lock(control_.mu);
  return control_.sent;
}

int64_t Nccl::received() {
  const Lock lock(control_.mu);
  return control_.received;
}

void Nccl::Set(bool* what, bool to) {
  const Lock lock(control_.mu);
  *what = to;
  control_.changed.notify_all();
}

void Nccl::Reset() {
  std::map<void*, std::shared_ptr<Communicator>> all;
  std::vector<std::unique_ptr<FakeNcclRoot>> roots;
  {
    const Lock lock(control_.mu);
    all.swap(communicators_);
    roots.swap(roots_);
    control_.hold_launches = control_.hold_transfers = control_.hold_aborts = control_.silent = false;
    control_.sent = control_.received = 0;
    last_error_.clear();
    until_failure_ = 0;
    version_ = 22703;
    control_.changed.notify_all();
  }
  for (const auto& [handle, communicator] : all) communicator->Abort();
}

}  // namespace
}  // namespace ballast

// --- the library's functions ----------------------------------------------------------------------------------------

using Library = ballast::Nccl;

extern "C" {

ballast::FakeNccl* FakeNcclOfTests() { return &Library::Get(); }

const char* ncclGetErrorString(int result) {
  static const std::map<int, const char*> texts = {
      {0, "no error"},
      {1, "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"},
      {2, "unhandled system error (run with NCCL_DEBUG=INFO for details)"},
      {3, "internal error - please report this issue to the NCCL developers"},
      {4, "invalid argument (run with NCCL_DEBUG=WARN for details)"},
      {5, "invalid usage (run with NCCL_DEBUG=WARN for details)"},
      {6, "remote process exited or there was a network error"},
      {7, "NCCL operation in progress"}};
  const auto found = texts.find(result);
  return found == texts.end() ? "unknown result code" : found->second;
}
const char* ncclGetLastError(void* communicator) { return Library::Get().LastError(communicator); }

int ncclGetVersion(int* version) { return Library::Get().GetVersion(version); }
int ncclGetUniqueId(ballast::UniqueId* id) { return Library::Get().MakeId(id); }
int ncclCommInitRankConfig(void** communicator, int ranks, ballast::UniqueId id, int rank, ballast::Config* config) {
  return Library::Get().Init(communicator, ranks, id, rank, config);
}
int ncclCommGetAsyncError(void* communicator, int* state) { return Library::Get().State(communicator, state); }
int ncclCommAbort(void* communicator) { return Library::Get().Abort(communicator); }

int ncclGroupStart() { return Library::Get().StartGroup(); }
int ncclGroupEnd() { return Library::Get().EndGroup(); }
int ncclSend(const void* at, size_t bytes, int type, int peer, void* communicator, void* stream) {
  return Library::Get().Give(true, {.at = const_cast<void*>(at), .bytes = bytes}, type, peer, communicator, stream);
}
int ncclRecv(void* at, size_t bytes, int type, int peer, void* communicator, void* stream) {
  return Library::Get().Give(false, {.at = at, .bytes = bytes}, type, peer, communicator, stream);
}

}  // extern "C"
