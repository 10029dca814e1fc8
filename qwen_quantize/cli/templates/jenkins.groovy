// Checks every night whether a chip still computes as its model was calibrated for; with RECALIBRATE it quantizes again,
// into MODEL.new. Needs the JUnit plugin, and a node that has the model and the device.
//
@NOTES@
pipeline {
  agent any
  triggers { cron('H 4 * * *') }
  parameters {
    string(name: 'TOOL', defaultValue: 'tools/qwen_quantize')
    string(name: 'MODEL', defaultValue: @MODEL@)
    string(name: 'DEVICE', defaultValue: @DEVICE@)
    string(name: 'BEFORE', defaultValue: '')
    string(name: 'REFERENCE', defaultValue: 'none')
    string(name: 'HELDOUT', defaultValue: '')
    string(name: 'CALIBRATION', defaultValue: '')
    string(name: 'TOKENS', defaultValue: '51200')
    booleanParam(name: 'RECALIBRATE', defaultValue: false, description: 'quantize again where the gate says no')
  }
  stages {
    stage('install') {
      steps {
        sh '''
          python3 -m venv .venv
          .venv/bin/pip install -c "$TOOL/constraints.txt" "$TOOL"
        '''
      }
    }
    stage('check') {
      when { expression { !params.RECALIBRATE } }
      steps {
        sh '''
          set -e
          PATH="$PWD/.venv/bin:$PATH"
          @CHECK@
        '''
      }
    }
    stage('recalibrate') {
      when { expression { params.RECALIBRATE } }
      steps {
        sh '''
          set -e
          PATH="$PWD/.venv/bin:$PATH"
          @RECALIBRATE@
        '''
      }
    }
  }
  post {
    always {
      junit allowEmptyResults: true, testResults: 'regress.xml'
      archiveArtifacts allowEmptyArchive: true, artifacts: 'fingerprint.json,eval.json,compare.html,report.html,regress.xml'
    }
  }
}
