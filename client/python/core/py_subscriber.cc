#include "client/python/core/py_subscriber.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "client/python/core/interruptible.h"
#include "client/python/core/py_client.h"
#include "client/python/core/status_error.h"

namespace ballast {
namespace {

namespace nb = nanobind;

// Between two looks at whether Ctrl-C was pressed.
constexpr double kSignalGlanceS = 0.1;

nb::dict DictOf(const FollowedVersion& version) {
  nb::dict out;
  out["step"] = version.step;
  out["generation"] = version.generation;
  out["base_step"] = version.base_step ? nb::object(nb::int_(*version.base_step)) : nb::object(nb::none());
  out["changed"] = nb::cast(version.changed);
  out["changed_elements"] = version.changed_elements;
  out["elements"] = version.elements;
  out["received_bytes"] = version.received_bytes;
  out["whole_bytes"] = version.whole_bytes;
  out["skipped"] = version.skipped;
  out["closed_unix_s"] = version.closed_unix_s;
  out["respecified"] = version.respecified;
  out["tag"] = version.tag;
  return out;
}

// The answer of `wait(seconds)`, asked again and again until it has come, as `come` tells, or timeout_s is over.
template <typename Wait, typename Come>
auto WaitInGlances(double timeout_s, const Wait& wait, const Come& come) {
  const absl::Time until = absl::Now() + absl::Seconds(timeout_s);
  for (;;) {
    const double left_s = std::max(0.0, absl::ToDoubleSeconds(until - absl::Now()));
    auto answer = Unlocked([&] { return wait(std::min(left_s, kSignalGlanceS)); });
    if (come(answer) || left_s == 0) return answer;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace

PySubscriber PySubscriber::Open(ClientOptions options, const SubscribeOptions& subscription) {
  options.interrupted = SignalRaised;
  auto subscriber =
      InterruptibleCalls().Make([options, subscription] { return Subscriber::Open(options, subscription); }, [] {});
  return PySubscriber(OrThrow(std::move(subscriber)));
}

PySubscriber::PySubscriber(std::unique_ptr<Subscriber> subscriber)
    : subscriber_(std::move(subscriber)), process_(getpid()) {}

PySubscriber::~PySubscriber() { Close(); }

void PySubscriber::Close() {
  if (!subscriber_) return;
  if (getpid() != process_) {
    new std::shared_ptr<Subscriber>(std::move(subscriber_));  // the parent's: never destroyed here
    return;
  }
  Unlocked([subscriber = std::exchange(subscriber_, nullptr)]() mutable {
    subscriber->Close();
    subscriber.reset();
  });
}

std::shared_ptr<Subscriber> PySubscriber::Get() const {
  if (!subscriber_) throw StatusError(ConnectionIsClosed());
  OrThrow(OfThisProcess(process_));
  return subscriber_;
}

nb::object PySubscriber::Next(double timeout_s) const {
  const auto subscriber = Get();
  const auto version = OrThrow(WaitInGlances(
      timeout_s, [&](double seconds) { return subscriber->Next(seconds); },
      [](const auto& answer) { return !answer.ok() || answer->has_value(); }));
  return version ? nb::object(DictOf(*version)) : nb::object(nb::none());
}

bool PySubscriber::Await(double timeout_s) const {
  const auto subscriber = Get();
  return WaitInGlances(
      timeout_s, [&](double seconds) { return subscriber->Await(seconds); }, [](bool there) { return there; });
}

nb::list PySubscriber::Tensors() const {
  nb::list tensors;
  for (const v1::TensorSpec& tensor : Get()->spec().tensors()) {
    nb::list shape;
    for (const int64_t extent : tensor.shape()) shape.append(extent);
    tensors.append(nb::make_tuple(tensor.name(), tensor.dtype(), nb::tuple(shape)));
  }
  return tensors;
}

void PySubscriber::Read(const Places& places) const {
  const auto subscriber = Get();
  OrThrow(Unlocked([&] {
    for (const auto& [tensor, address, bytes] : places) {
      const auto room = absl::MakeSpan(reinterpret_cast<std::byte*>(address), bytes);
      if (auto s = subscriber->Read(tensor, room); !s.ok()) return s;
    }
    return absl::OkStatus();
  }));
}

uint64_t PySubscriber::CountChanged(uint32_t tensor) const { return OrThrow(Get()->CountChanged(tensor)); }

void PySubscriber::ReadChanged(uint32_t tensor, uint64_t count, uintptr_t places, uintptr_t values,
                               uint64_t bytes) const {
  OrThrow(Unlocked([&, subscriber = Get()] {
    return subscriber->ReadChanged(tensor, {reinterpret_cast<int64_t*>(places), count},
                                   {reinterpret_cast<std::byte*>(values), bytes});
  }));
}

void PySubscriber::Rollback(const std::string& tag) const {
  const auto subscriber = Get();
  OrThrow(Unlocked([&] { return subscriber->Rollback(tag); }));
}

void BindSubscriber(nb::module_& module) {
  using nb::arg;
  nb::class_<PySubscriber>(module, "Subscriber")
      .def_static(
          "open",
          [](const std::string& server, const std::string& run_id, uint64_t every, bool marks_changed,
             double connect_timeout_s, double reconnect_timeout_s, const std::string& ca,
             const std::string& certificate, const std::string& key, const std::string& token_file,
             const std::string& tag, std::optional<double> average, const std::string& format, double wait_for_run_s) {
            return PySubscriber::Open({.server = server,
                                       .tls = {.ca = ca, .certificate = certificate, .key = key},
                                       .token_file = token_file,
                                       .connect_timeout_s = connect_timeout_s,
                                       .reconnect_timeout_s = reconnect_timeout_s},
                                      {.run_id = run_id,
                                       .every = every,
                                       .marks_changed = marks_changed,
                                       .tag = tag,
                                       .average = average,
                                       .format = format,
                                       .wait_for_run_s = wait_for_run_s});
          },
          arg("server"), arg("run_id"), arg("every"), arg("marks_changed"), arg("connect_timeout_s"),
          arg("reconnect_timeout_s"), arg("tls_ca") = "", arg("tls_certificate") = "", arg("tls_key") = "",
          arg("token_file") = "", arg("tag") = "", arg("average").none() = nb::none(), arg("format") = "",
          arg("wait_for_run_s") = 0.0)
      .def("next", &PySubscriber::Next, arg("timeout_s"))
      .def("await_next", &PySubscriber::Await, arg("timeout_s"))
      .def_prop_ro("readable", &PySubscriber::readable)
      .def("tensors", &PySubscriber::Tensors)
      .def("read", &PySubscriber::Read, arg("places"))
      .def("count_changed", &PySubscriber::CountChanged, arg("tensor"))
      .def("read_changed", &PySubscriber::ReadChanged, arg("tensor"), arg("count"), arg("places"), arg("values"),
           arg("bytes"))
      .def("rollback", &PySubscriber::Rollback, arg("tag"))
      .def("resume", &PySubscriber::Resume)
      .def("close", &PySubscriber::Close);
}

}  // namespace ballast
