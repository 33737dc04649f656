#include "server/shm/shm_listener.h"

#include <dirent.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/retry_after.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/rpc/admission.h"
#include "server/slots/gpu_slots.h"
#include "server/slots/slot_shape.h"

namespace ballast {
namespace {

constexpr absl::string_view kSuffix = ".shm.sock";
constexpr int kRetryMs = 100;

// Ours or root's, and nobody else writes to it: a socket of that name is then ours.
absl::Status MakeFolder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::UnavailableError(absl::StrCat("cannot make the folder ", folder, ": ", std::strerror(errno)));
  }
  struct stat found {};
  const bool there = lstat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
  if (there && MayShareMemory(found.st_uid, geteuid()) && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat(folder, " is not a folder that only this user can write to; remove it, or set shm_socket"));
}

// Removes the sockets that killed daemons left in the folder.
void RemoveLeftSockets(const std::string& folder) {
  DIR* const open = opendir(folder.c_str());
  if (open == nullptr) return;
  while (const dirent* entry = readdir(open)) {
    const std::string path = absl::StrCat(folder, entry->d_name);
    if (absl::EndsWith(path, kSuffix) && ShmSocket::IsLeft(path)) unlink(path.c_str());
  }
  closedir(open);
}

// The shape of a segment whose slots are on_gpu, with their memory; or why that cannot be, and the usual one.
ShmShape ShapeForGpu(const DevicePool& devices, const Run& run, ShmStream::Connection* connection) {
  const ShmShape shape = GpuShapeOf(run.spec(), run.plan());
  auto memory = ExportSlots(devices, run, shape);
  if (memory.ok()) {
    connection->gpu = *std::move(memory);
    return shape;
  }
  connection->why_no_gpu = std::string(memory.status().message());
  return ShapeOf(run.spec(), run.plan());
}

ShmGrant Refusal(const absl::Status& why) {
  ShmGrant grant{.code = static_cast<uint32_t>(why.code()),
                 .retry_after_ms = static_cast<uint32_t>(RetryAfterMsOf(why).value_or(0))};
  why.message().copy(grant.message.data(), grant.message.size() - 1);
  return grant;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShmListener>> ShmListener::Start(const RpcEnvironment& environment,
                                                                const std::string& where, const std::string& name) {
  std::string path = where;
  if (absl::EndsWith(where, "/")) {
    RETURN_IF_ERROR(MakeFolder(where.substr(0, where.size() - 1)));
    RemoveLeftSockets(where);
    absl::StrAppend(&path, name, kSuffix);
  }
  ASSIGN_OR_RETURN(ShmSocket socket, ShmSocket::Listen(path));
  std::unique_ptr<ShmListener> listener(new ShmListener(environment, std::move(path), std::move(socket)));
  listener->stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (listener->stop_fd_ < 0) return absl::UnavailableError("the system refused an eventfd");
  listener->thread_ = std::thread([self = listener.get()] { self->Loop(); });
  return listener;
}

ShmListener::ShmListener(const RpcEnvironment& environment, std::string path, ShmSocket socket)
    : environment_(environment), path_(std::move(path)), socket_(std::move(socket)) {}

ShmListener::~ShmListener() {
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  if (stop_fd_ >= 0) close(stop_fd_);
  unlink(path_.c_str());
}

void ShmListener::Loop() {
  std::vector<bool> stirred;
  while (Wait(&stirred)) {
    for (size_t i = guests_.size(); i-- > 0;) {
      if (!stirred[i] || (guests_[i].stream == nullptr && Answer(&guests_[i]))) continue;
      if (guests_[i].stream != nullptr) guests_[i].stream->HangUpAndJoin();
      guests_.erase(guests_.begin() + static_cast<ptrdiff_t>(i));
    }
    Admit();
  }
  for (const Guest& guest : guests_) {
    if (guest.stream != nullptr) guest.stream->HangUpAndJoin();
  }
}

bool ShmListener::Wait(std::vector<bool>* stirred) {
  std::vector<pollfd> fds = {{.fd = stop_fd_, .events = POLLIN, .revents = 0},
                             {.fd = socket_.fd(), .events = POLLIN, .revents = 0}};
  bool shy = false;  // one has not said who it is
  for (const Guest& guest : guests_) {
    const bool streams = guest.stream != nullptr;
    fds.push_back({.fd = guest.fd(), .events = static_cast<short>(streams ? POLLRDHUP : POLLIN), .revents = 0});
    shy = shy || !streams;
  }
  if (guests_.size() >= kMostGuests || rest_) fds[1].fd = -1;
  const bool rest = std::exchange(rest_, false);
  poll(fds.data(), fds.size(), rest ? kRetryMs : shy ? static_cast<int>(kHelloS * 1000) : -1);
  const double now_s = MonotonicSeconds();
  stirred->clear();
  for (size_t i = 0; i < guests_.size(); ++i) {
    const bool late = guests_[i].stream == nullptr && now_s > guests_[i].since_s + kHelloS;
    stirred->push_back(fds[i + 2].revents != 0 || late);
  }
  return fds[0].revents == 0;
}

void ShmListener::Admit() {
  while (guests_.size() < kMostGuests && AdmitOne()) {
  }
}

bool ShmListener::AdmitOne() {
  auto socket = socket_.Accept();
  if (absl::IsResourceExhausted(socket.status())) {
    rest_ = !spare_.Use([&] { socket = socket_.Accept(); });
  } else if (socket.ok() && LeavesKeptDescriptors(socket->fd())) {
    guests_.push_back({.socket = *std::move(socket), .stream = nullptr, .since_s = MonotonicSeconds()});
    return true;
  }
  if (!socket.ok()) return false;
  Log(LogLevel::kWarn, "transport", "shared memory refused", {{"err", "file descriptors run short"}});
  return true;
}

bool ShmListener::Answer(Guest* guest) {
  const auto hello = guest->socket.ReceiveHello();
  if (!hello.ok()) return false;
  const absl::Status begun = Begin(guest, *hello);
  if (begun.ok()) return guest->stream->Grant().ok();
  // What is put off is in the log as "quota", at most once in some seconds.
  if (!RetryAfterMsOf(begun))
    Log(LogLevel::kWarn, "transport", "shared memory refused", {{"err", std::string(begun.message())}});
  guest->socket.Answer(Refusal(begun), {}).IgnoreError();  // it is dismissed either way
  return false;
}

absl::Status ShmListener::Begin(Guest* guest, const ShmSocket::Hello& hello) {
  ASSIGN_OR_RETURN(ShmStream::Connection connection, Grant(*guest, hello));
  connection.socket = std::move(guest->socket);
  auto stream = ShmStream::Start(environment_, &connection);
  if (stream.ok()) {
    guest->stream = *std::move(stream);
  } else {
    guest->socket = std::move(connection.socket);
  }
  return stream.status();
}

absl::StatusOr<ShmStream::Connection> ShmListener::Grant(const Guest& guest, const ShmSocket::Hello& hello) const {
  ASSIGN_OR_RETURN(const ucred peer, guest.socket.Peer());
  if (!MayShareMemory(peer.uid, geteuid())) {
    return absl::PermissionDeniedError(
        absl::StrCat("the trainer runs as user ", peer.uid, ", the daemon as ", geteuid()));
  }
  ShmStream::Connection made;
  made.token.assign(hello.token.data(), hello.token.size());
  made.peer = absl::StrCat("pid ", peer.pid);
  const auto session = environment_.sessions->Find(made.token);
  if (!session) return absl::NotFoundError("this daemon knows no session with the token");
  // What its Attach was let in for may have been taken back since.
  ASSIGN_OR_RETURN(made.place, AdmitStream(environment_, session->caller, "Train", session->run_id, nullptr));
  ASSIGN_OR_RETURN(const std::shared_ptr<Run> run, environment_.runs->Find(session->run_id));
  const auto same = [&](const Guest& g) { return g.stream != nullptr && g.stream->token() == made.token; };
  if (std::count_if(guests_.begin(), guests_.end(), same) >= 2) {
    return absl::ResourceExhaustedError("the session's earlier streams are not over yet");
  }
  const ShmShape shape =
      hello.takes_gpu ? ShapeForGpu(*environment_.devices, *run, &made) : ShapeOf(run->spec(), run->plan());
  ASSIGN_OR_RETURN(made.segment, ShmSegment::Create(shape));
  return made;
}

}  // namespace ballast
