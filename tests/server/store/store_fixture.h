// A store on the CPU whose tensors are loaded and updated from the strand, for tests of what works on it there.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/store/parameter_store.h"
#include "tests/server/specs.h"

namespace ballast::testing {

class StoreTest : public ::testing::Test {
 protected:
  // Threads of the device.
  explicit StoreTest(uint32_t threads = 1) : device_({.threads = threads}) {}

  // All zero, by default in one chunk each.
  void MakeEmptyStore(const v1::RunSpec& wire, const Config::Limits& limits = {}) {
    spec_ = ToRunSpec(wire, limits).value();
    plan_ = MakePlan(spec_);
    OnStrand([&] {
      store_ =
          ParameterStore::Create({.spec = &spec_, .plan = &plan_, .devices = {&device_}, .strand = &strand_}).value();
    });
  }
  // Loaded, in several chunks a tensor.
  void MakeStore(const v1::RunSpec& wire) {
    Config::Limits limits;
    limits.chunk_bytes = 4 * 4096;
    MakeEmptyStore(wire, limits);
    for (uint32_t i = 0; i < spec_.tensors.size(); ++i) {
      OnStrand([&] { Change(i, 1); });
    }
    store_->WaitIdle();
  }
  // Before the members that its callbacks need go.
  void TearDown() override {
    store_->WaitIdle();
    strand_.Stop();
  }

  void OnStrand(absl::FunctionRef<void()> work) {
    absl::Notification done;
    strand_.Post([&] {
      work();
      done.Notify();
    });
    done.WaitForNotification();
  }

  // On the strand: other weights, the same for the same seed.
  void Change(uint32_t tensor, uint64_t seed) {
    auto values = std::make_unique<std::vector<float>>(spec_.tensors[tensor].elements);
    for (size_t e = 0; e < values->size(); ++e) (*values)[e] = static_cast<float>((e * 7 + seed * 31 + tensor) % 1009);
    const auto* in = reinterpret_cast<const std::byte*>(values->data());
    store_->Load({tensor, 0, spec_.tensors[tensor].elements}, kernels::FindWireFormat("fp32"), in,
                 [values = std::move(values)](const TaskResult&) {});
  }

  CpuDevice device_;
  Strand strand_{{.name = "test"}};
  RunSpec spec_;
  Plan plan_;
  std::unique_ptr<ParameterStore> store_;
};

}  // namespace ballast::testing
