// Shared memory where there is an access file: it is for who may train the run now, not only for who has attached.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "proto/tls/sha256.h"

#include "tests/certificates.h"
#include "tests/eventually.h"
#include "tests/server/shm/shm_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class ShmAccessRpcTest : public ShmRpcTest {
 protected:
  void SetUp() override {
    Give({"trainer", "next"});
    Config config = DefaultConfig();
    config.access = files_.Path("access.yaml");
    StartServer(config);
  }
  // The tokens that are known from now on.
  void Give(const std::vector<std::string>& tokens) const {
    std::string grants = "grants:\n- {name: nobody, identity: x, runs: [none], scope: observe}\n";
    for (const std::string& token : tokens) {
      absl::StrAppend(&grants, "- {name: ", token, ", token_sha256: ", Sha256Hex(token),
                      ", runs: [r1], scope: push}\n");
    }
    files_.Write("access.yaml", grants, 0644);
  }
  std::string Reloads(int times) const {
    return absl::StrCat("ballast_access_reloads_total{result=\"success\"} ", times, "\n");
  }
  v1::AttachResponse AttachWith(const std::string& token, const std::string& session = "") {
    grpc::ClientContext creating, attaching;
    Bring(token, &creating);
    Bring(token, &attaching);
    const absl::Status created = CreateRun(SmallSpec(), &creating).status();
    EXPECT_TRUE(created.ok()) << created;
    v1::AttachRequest attach;
    attach.set_run_id("r1");
    attach.set_session_token(session);
    v1::AttachResponse attached;
    const grpc::Status t = Attach(attach, &attached, &attaching);
    EXPECT_TRUE(t.ok()) << t.error_message();
    return attached;
  }

  const TestCertificates files_;
};

TEST_F(ShmAccessRpcTest, AGrantThatWasTakenBackOpensNoStream) {
  const v1::AttachResponse attached = AttachWith("trainer");
  EXPECT_TRUE(Ask(attached, attached.session_token()).ok());
  Give({"next"});
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads(1)));
  const absl::Status refused = Ask(attached, attached.session_token()).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("does not know this token"));
}

TEST_F(ShmAccessRpcTest, WhoResumesASessionIsWhoseRightCounts) {
  const v1::AttachResponse attached = AttachWith("trainer");
  AttachWith("next", attached.session_token());
  Give({"next"});
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads(1)));
  EXPECT_TRUE(Ask(attached, attached.session_token()).ok());
}

}  // namespace
}  // namespace ballast::testing
