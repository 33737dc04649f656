// ballast._core: ballast::Client for Python, one method each, and what ballast.numerics asks the kernels.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/synchronization/mutex.h"
#include "proto/checksum.h"

#include "client/python/core/interpreter_lock.h"
#include "client/python/core/live_instances.h"
#include "client/python/core/memory.h"
#include "client/python/core/numerics.h"
#include "client/python/core/numerics_digest.h"
#include "client/python/core/pending_measure.h"
#include "client/python/core/pending_step.h"
#include "client/python/core/push_queue.h"
#include "client/python/core/py_client.h"
#include "client/python/core/py_subscriber.h"
#include "client/python/core/runs.h"
#include "client/python/core/status_error.h"
#include "client/python/core/trainer.h"

namespace ballast {
namespace {

namespace nb = nanobind;

void BindClient(nb::module_& module) {
  using nb::arg;
  nb::class_<PyClient> client(module, "Client");
  client
      .def_static(
          "connect",
          [](const std::string& server, double connect_timeout_s, double reconnect_timeout_s, const std::string& ca,
             const std::string& certificate, const std::string& key, const std::string& token_file) {
            return PyClient::Connect({.server = server,
                                      .tls = {.ca = ca, .certificate = certificate, .key = key},
                                      .token_file = token_file,
                                      .connect_timeout_s = connect_timeout_s,
                                      .reconnect_timeout_s = reconnect_timeout_s});
          },
          arg("server"), arg("connect_timeout_s"), arg("reconnect_timeout_s"), arg("tls_ca") = "",
          arg("tls_certificate") = "", arg("tls_key") = "", arg("token_file") = "")
      .def("beside", &PyClient::Beside, arg("timeout_s"))
      .def("close", &PyClient::Close)
      .def_prop_ro("server", [](const PyClient& self) { return self.Get()->server(); });
  BindRuns(client);
  BindTrainer(client);
}

void BindDigests(nb::module_& module) {
  using nb::arg;
  module.def(
      "digest",
      [](Address address, uint64_t bytes) {
        const LockFreed unlocked;
        return WeightDigest(BytesAt(address, bytes));
      },
      arg("address"), arg("nbytes"), "xxh3_64 of the bytes.");
  module.def(
      "served_digest",
      [](const std::string& master, const std::string& serving, const std::string& format, uint64_t elements,
         uint64_t columns, Address address) {
        const ServedAs tensor{
            .master = master, .serving = serving, .format = format, .elements = elements, .columns = columns};
        const LockFreed unlocked;
        return ServedDigest(tensor, reinterpret_cast<const std::byte*>(address));
      },
      arg("master"), arg("serving"), arg("format"), arg("elements"), arg("columns"), arg("address"),
      "The daemon's digest of these weights, had they been uploaded.");
}

}  // namespace
}  // namespace ballast

NB_MODULE(_core, module) {
  // What is still alive when the interpreter ends was closed before, by ballast.open_optimizers.
  nanobind::set_leak_warnings(false);
  // Debian builds Abseil with its search for deadlocks on, which every lock of every thread pays for.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  ballast::RegisterStatusError();
  ballast::BindPendingStep(module);
  ballast::BindPushQueue(module);
  ballast::BindPendingMeasure(module);
  ballast::BindClient(module);
  ballast::BindSubscriber(module);
  ballast::BindNumerics(module);
  ballast::BindDigests(module);
  module.def("live_instances", &ballast::LiveInstances, nanobind::arg("kind"),
             "Objects of this type, and of classes of it, that the garbage collector knows.");
}
