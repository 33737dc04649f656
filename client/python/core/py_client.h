// ballast::Client for Python, and the process that it lives in: its threads do not survive a fork, so a child neither
// uses it nor takes it down. What is asked of it is in runs.h and trainer.h. Used with the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "client/cpp/client.h"
#include "client/python/core/interruptible.h"
#include "client/python/core/message.h"
#include "client/python/core/status_error.h"

namespace ballast {

absl::Status ConnectionIsClosed();
// Whether this is the process that made the connection, or its fork.
absl::Status OfThisProcess(pid_t owner);

class PyClient {
 public:
  static PyClient Connect(ClientOptions options);
  // Another connection to the same daemon, for calls that are made while this one is in use.
  PyClient Beside(double timeout_s) const;
  PyClient(PyClient&&) = default;
  ~PyClient();
  void Close();

  // For calls that are not made by Ask: none that was left behind goes on beside them.
  std::shared_ptr<Client> Get() const;

  // To be called before the client goes: what ends those that use it beside this. Once it was called it is forgotten.
  void BeforeClose(std::function<void()> end) const { ends_.push_back(std::move(end)); }

  // How many bytes of weights the upload or pull under way has moved, or the last one. Written by its thread, read by any.
  std::atomic<uint64_t>& moved() const { return *moved_; }

  // What this process holds of the run's tensors, since it attached to it; empty: all.
  Shards ShardsOf(const std::string& run_id) const { return run_id == attached_to_ ? shards_ : Shards(); }
  void Hold(const std::string& run_id, const Shards& shards) const {
    attached_to_ = run_id;
    shards_ = shards;
  }

  // The answer to call(client), an absl::StatusOr. Ctrl-C ends the wait.
  template <typename Call>
  auto Ask(Call call) const {
    return AskOrUndo(std::move(call), [](Client&) {});
  }

  // `undo`: of a call that succeeds although Ctrl-C ended the wait for it.
  template <typename Call, typename Undo>
  auto AskOrUndo(Call call, Undo undo) const {
    return calls_.Make([client = Open(), call = std::move(call)] { return call(*client); },
                       [client = Open(), undo] { undo(*client); });
  }

  // Asks again when the connection was dead: one lost while no call was open is found out by the next only. For calls
  // that may reach the daemon twice.
  template <typename Call>
  nanobind::dict AskForDict(Call call) const {
    auto answer = Ask(call);
    if (absl::IsUnavailable(answer.status())) answer = Ask(std::move(call));
    return ToDict(OrThrow(std::move(answer)));
  }

  // For those that are another the second time: a connection that was lost is made anew by ListRuns. `perhaps`: what
  // the caller does not know when the answer is lost.
  template <typename Call>
  nanobind::dict AskOnceForDict(Call call, const std::string& perhaps) const {
    OrThrow(Ask([](Client& client) { return client.ListRuns(); }));
    auto answer = Ask(std::move(call));
    if (!absl::IsUnavailable(answer.status())) return ToDict(OrThrow(std::move(answer)));
    throw StatusError(AddTo(answer.status(), perhaps));
  }

 private:
  PyClient(std::unique_ptr<Client> client, ClientOptions options);

  // Throws when it was closed, and in a fork.
  std::shared_ptr<Client> Open() const;
  // UNAVAILABLE, with "; " and `perhaps` after what `lost` says.
  static absl::Status AddTo(const absl::Status& lost, const std::string& perhaps);

  std::shared_ptr<Client> client_;
  ClientOptions options_;  // that it was connected with
  pid_t process_;
  std::shared_ptr<std::atomic<uint64_t>> moved_ = std::make_shared<std::atomic<uint64_t>>(0);
  mutable InterruptibleCalls calls_;
  mutable std::vector<std::function<void()>> ends_;
  mutable std::string attached_to_;
  mutable Shards shards_;
};

}  // namespace ballast
