# ballast_discover_tests(NAME [LABEL label] [SHARDS number] [TEST_PREFIX prefix]) makes the tests of a GoogleTest program known
# to ctest: one by one, but under sanitizers all as one, since a sanitized program takes longer to start than most tests; or as
# so many, NAME.0 and on, that run side by side: of a program with many tests.
#
# A label that begins with "optimized": a test that sanitizers leave out, or of code that they change. Of preset dev tests/run.sh
# runs these, which target optimized_tests builds, and of preset asan all that there are, which target all_tests builds.
include(GoogleTest)
set(unsanitized "*SimulatorMutantTest.*")  # tests of the tests' own checkers, which take minutes without optimization

if(NOT TARGET all_tests)
  add_custom_target(all_tests)
  add_custom_target(optimized_tests)
endif()

function(ballast_discover_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;SHARDS;TEST_PREFIX" "")
  set(label)
  if(arg_LABEL)
    set(label PROPERTIES LABELS ${arg_LABEL})  # one, since CMake's versions differ in how they hand a list on
  endif()
  add_dependencies(all_tests ${name})
  if(arg_LABEL MATCHES "^optimized")
    add_dependencies(optimized_tests ${name})
  endif()
  if(NOT BALLAST_SANITIZER)
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_PREFIX "${arg_TEST_PREFIX}" ${label})
  elseif(NOT arg_SHARDS)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES ENVIRONMENT "GTEST_FILTER=-${unsanitized}")
  else()
    math(EXPR last "${arg_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${name}.${shard} COMMAND ${name})
      set_tests_properties(${name}.${shard} PROPERTIES ENVIRONMENT
                           "GTEST_FILTER=-${unsanitized};GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
  endif()
endfunction()

# ballast_optimized_test(NAME PROGRAM): the label "optimized" for a test that add_test made.
function(ballast_optimized_test name program)
  set_tests_properties(${name} PROPERTIES LABELS optimized)
  add_dependencies(optimized_tests ${program})
  add_dependencies(all_tests ${program})
endfunction()
