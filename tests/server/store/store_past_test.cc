// Stores that take the place of others.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/store/trained_store.h"

namespace ballast::testing {
namespace {

class StorePastTest : public ParameterStoreTest {};

TEST_P(StorePastTest, AStoreTakesThePlanesOfAnotherOverAsTheyLie) {
  for (const Kernel& kernel : {Kernel{"adamw", "split24", "companded8"}, {"adamw", "fp32", "fp32"}}) {
    Store past(device_.get(), kernel), twin(device_.get(), kernel);
    const auto update = [](Store* store, uint64_t step) {
      store->FillGradients(step);
      store->DoAll(kUpdate, step);
    };
    for (Store* store : {&past, &twin}) update(store, 1);
    Store grown(device_.get(), kernel, &past);
    EXPECT_EQ(grown->bytes().stored(), grown.plan().bytes.stored());
    EXPECT_EQ(past->bytes().stored(), 0u) << "no weight is there twice";
    EXPECT_EQ(grown->updates(3), 0u);
    for (uint64_t step = 2; step <= 4; ++step) {
      for (uint32_t i = 0; i < past.tensors(); ++i) {
        EXPECT_EQ(grown.Weights(i), twin.Weights(i));
        EXPECT_EQ(grown->updates(i), step - 1);
        EXPECT_EQ(grown->step_of(i), step - 1);
      }
      for (Store* store : {&grown, &twin}) update(store, step);
    }
    const StoreImage image = grown.Image();
    std::vector<std::vector<float>> saved;
    for (uint32_t i = 0; i < grown.tensors(); ++i) saved.push_back(grown.Weights(i));
    update(&grown, 5);
    for (uint32_t i = 0; i < grown.tensors(); ++i) {
      EXPECT_NE(grown.Weights(i), saved[i]);
      grown->Restore(i, image, {grown->updates(i) - 1, 4});
      EXPECT_EQ(grown.Weights(i), saved[i]);
    }
  }
}

// fp32 holds all that the others have.
TEST_P(StorePastTest, WhatIsStoredOtherwiseIsMadeOfThePlanesAsTheyWillBe) {
  Store past(device_.get(), {"adamw", "split24", "companded8"});
  past.FillGradients(1);
  past.DoAll(kUpdate, 1);
  const StoreImage image = past.Image();
  const std::vector<std::string> before = past.Read({0, 0, 70000});
  past.FillGradients(2);
  past.DoAll(kUpdate, 2);
  for (uint32_t i = 0; i < past.tensors(); ++i) past->Restore(i, image, {1, 1});  // nobody has waited for it
  Store wide(device_.get(), {"adamw", "fp32", "fp32"}, &past);
  EXPECT_EQ(wide->bytes().stored(), wide.plan().bytes.stored());
  EXPECT_EQ(wide.Read({0, 0, 70000}), before);
  EXPECT_EQ(wide->updates(0), 1u);
}

INSTANTIATE_TEST_SUITE_P(Devices, StorePastTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Gpu" : "Cpu"; });

}  // namespace
}  // namespace ballast::testing
