#include "client/python/core/py_client.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/python/core/interpreter_lock.h"

namespace ballast {

namespace nb = nanobind;

absl::Status ConnectionIsClosed() { return absl::FailedPreconditionError("the connection is closed"); }

absl::Status OfThisProcess(pid_t owner) {
  if (getpid() == owner) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this connection belongs to process ", owner,
                                                    " and does not work in its fork ", getpid(),
                                                    ": make the optimizer in the process that trains"));
}

PyClient PyClient::Connect(ClientOptions options) {
  options.interrupted = SignalRaised;
  auto client = InterruptibleCalls().Make([options] { return Client::Connect(options); }, [] {});
  return PyClient(OrThrow(std::move(client)), std::move(options));
}

PyClient::PyClient(std::unique_ptr<Client> client, ClientOptions options)
    : client_(std::move(client)), options_(std::move(options)), process_(getpid()) {}

PyClient PyClient::Beside(double timeout_s) const {
  ClientOptions options = options_;
  options.server = Get()->server();
  options.connect_timeout_s = options.reconnect_timeout_s = timeout_s;
  return Connect(std::move(options));
}

PyClient::~PyClient() { Close(); }

void PyClient::Close() {
  if (!client_) return;
  calls_.Forget();
  if (getpid() != process_) {
    new std::shared_ptr<Client>(std::move(client_));  // the parent's: never destroyed here
    return;
  }
  const LockFreed unlocked;
  for (const std::function<void()>& end : ends_) end();
  ends_.clear();
  client_.reset();
}

std::shared_ptr<Client> PyClient::Get() const {
  Open();  // first: a fork has no such call's thread to wait for
  calls_.AwaitLeft();
  return Open();
}

std::shared_ptr<Client> PyClient::Open() const {
  if (!client_) throw StatusError(ConnectionIsClosed());
  OrThrow(OfThisProcess(process_));
  return client_;
}

absl::Status PyClient::AddTo(const absl::Status& lost, const std::string& perhaps) {
  return absl::UnavailableError(absl::StrCat(lost.message(), "; ", perhaps));
}

}  // namespace ballast
